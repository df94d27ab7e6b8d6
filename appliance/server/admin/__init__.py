"""Routes for operators: health, metrics, API description, status page, request timelines."""
