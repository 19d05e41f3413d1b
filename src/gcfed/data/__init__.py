"""Partitions, cohorts, augmentation; samples as tensors on the device, batches by index."""
