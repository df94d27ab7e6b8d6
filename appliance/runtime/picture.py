"""Image of test requests and of examples."""

PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAKUlEQVR42u3MQREAAAwCIKMb3RD77SAA6VEEAoFAIBAI"
    "BAKBQCAQfA8G320AeXC6efoAAAAASUVORK5CYII="
)
"""A grey square of 64 x 64 pixels."""
