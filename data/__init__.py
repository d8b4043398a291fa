"""Training data in parquet. Functions over rows and files, without models, services or config."""
