"""Where rows of metrics go: metrics.csv, TensorBoard, W&B, MLflow."""
