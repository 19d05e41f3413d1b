"""Partitions and augmentation; samples as tensors on the device, batches by index."""
