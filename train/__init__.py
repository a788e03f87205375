"""The distillation job."""
