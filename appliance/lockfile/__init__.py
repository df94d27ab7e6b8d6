"""Lock files: checksums of a checkpoint's files at the time of locking, and their verification."""
