"""Rotation, crop, flip and normalisation of each image, against PIL and NumPy."""

import numpy as np
import pytest
import torch
from PIL import Image

from gcfed.data.augment import ImageTransform


def test_images_are_rotated_cropped_and_flipped_in_this_order():
    mean = [0.1, 0.5, 0.9]
    std = [0.2, 0.5, 1.0]
    transform = ImageTransform(mean, std, crop_padding=4, flip=True, rotation=10)
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 32, 28), dtype=np.uint8)
    draws = transform.draw(np.random.default_rng(1), (60,))
    draws[0, 3] = 10_000  # no rotation
    got = transform(torch.from_numpy(images), torch.from_numpy(draws), torch.float64).numpy()
    mean, std = (np.array(values)[:, None, None] for values in (mean, std))
    for image, (row, column, flip, angle), ours in zip(images, draws, got, strict=True):
        turned = np.asarray(
            Image.fromarray(image.transpose(1, 2, 0)).rotate(angle / 1000 - 10)
        ).transpose(2, 0, 1)
        window = np.pad(turned, ((0, 0), (4, 4), (4, 4)))[:, row : row + 32, column : column + 28]
        expected = ((window[:, :, ::-1] if flip else window) / 255 - mean) / std
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)
    angles = transform.draw(np.random.default_rng(2), (20_000,))[:, 3] / 1000 - 10
    assert -10 <= angles.min() < -9.99 < 9.99 < angles.max() <= 10
    np.testing.assert_allclose(np.quantile(angles, [0.1, 0.5, 0.9]), [-8, 0, 8], atol=0.25)


@pytest.mark.parametrize(("rotation", "high"), [(0, [9, 9, 2]), (7, [9, 9, 2, 14_001])])
def test_draws_are_whole_numbers_from_one_stream(rotation, high):
    """With rotation=7 the angles run from −7 to 7 degrees; without it the draws have no angle."""
    transform = ImageTransform([0.0], [1.0], crop_padding=4, flip=True, rotation=rotation)
    expected = np.random.default_rng(3).integers(0, high, size=(4, 5, len(high)), dtype=np.int64)
    np.testing.assert_array_equal(transform.draw(np.random.default_rng(3), (4, 5)), expected)


def test_statistics_are_given_per_channel_or_once_for_all():
    for channels in (1, 3):
        ImageTransform([0.5] * channels, [1.0] * channels).check((3, 8, 2))
    with pytest.raises(
        ValueError, match=r"mean has 2 values; data\.input_shape=\[3, 8, 2\] has 3 channels"
    ):
        ImageTransform([0.5] * 2, [1.0] * 2).check((3, 8, 2))
