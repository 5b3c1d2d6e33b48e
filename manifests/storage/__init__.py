"""Object storage: one client for S3, Google Cloud Storage, Azure and HTTP, and data folders in a bucket."""
