"""The lock: what a checkpoint's files were when somebody looked at them, and that they still are that."""
