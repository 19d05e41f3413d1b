"""What fails today, by test: marked ``xfail(strict=True)``. Delete what has come right, and at last this file."""

from fnmatch import fnmatch

import pytest

FAILS_TODAY = {
    "test_a_network_trains_as_in_plain_pytorch": """
        InPlace-1-gcfed InPlace-3-gcfed ViewAfterConv-1-* ViewAfterConv-3-* RunningMean-3-* AssignedBuffer-1-*
        AssignedBuffer-3-* UnsavedBuffer-1-* UnsavedBuffer-3-* BufferInList-1-gcfed BufferInList-3-* MeanForTests-3-*
        Maximum-1-* Maximum-3-* StepCounter-1-* WeightInList-1-* WeightInList-3-* Penalty-1-* Penalty-3-* Closure-1-*
        Closure-3-* ForwardHook-1-* ForwardHook-3-* GradientHook-1-* GradientHook-3-* AccumulatedHook-1-*
        AccumulatedHook-3-* Checkpointed-1-* Checkpointed-3-* CheckpointedReentrant-1-* CheckpointedReentrant-3-*
        ClampedData-1-* ClampedData-3-* TiedInForward-1-* TiedInForward-3-* LayerDrop-1-* LayerDrop-3-* EarlyExit-1-*
        EarlyExit-3-* Counter-3-* PlainTensor-3-* Teacher-3-* TeacherByData-3-* OwnGenerator-3-* batch_norm-1-*
        batch_norm_cumulative-1-* batch_norm_plain-1-* OwnBatchNorm-3-* transposed-1-gcfed transposed-3-gcfed
        TwoAndThreeAxes-1-* TwoAndThreeAxes-3-* VisionTransformer-1-gcfed VisionTransformer-3-gcfed
    """,
    "test_what_cannot_be_trained_is_refused_with_the_wrapper_that_can": """
        TwoInputs TupleOutput DataclassOutput
    """,
    "test_a_run_is_the_same_over_the_wire": """
        Counter PlainTensor Teacher
    """,
    "test_a_network_that_works_in_place_leaves_the_data_whole": """
        InPlace-OutOfPlace InPlaceRelu-OutOfPlaceRelu
    """,
    "test_networks_of_one_function_train_alike": """
        InPlace-fedsam InPlace-moon WeightInList-fedsam WeightInList-moon Closure-fedsam Closure-moon
    """,
    "test_a_run_is_repeated_and_resumed_bit_for_bit": """
        PythonRandom NumpyRandom OwnGenerator Counter PlainTensor
    """,
    "test_a_start_in_float64_keeps_its_digits": """
        save-start.pt save_file-start.safetensors
    """,
    "test_the_spectral_norm_of_the_global_network_is_one": """
        spectrally_normalised spectrally_normalised_old
    """,
}


@pytest.fixture(autouse=True)
def not_yet(request):
    test, _, case = request.node.name.rstrip("]").partition("[")
    if any(fnmatch(case, pattern) for pattern in FAILS_TODAY.get(test, "").split()):
        request.applymarker(pytest.mark.xfail(strict=True))
