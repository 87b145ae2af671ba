"""s3://: pages in any S3-compatible store. The SDK is imported when the backend is opened."""

from .backend import S3Backend
from .config import S3Config
from .plane import S3Counts

__all__ = ["S3Backend", "S3Config", "S3Counts"]
