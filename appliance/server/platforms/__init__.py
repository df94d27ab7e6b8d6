"""Routes of hosting platforms: SageMaker, Vertex AI, Azure ML, KServe. They call the routes of the other APIs."""
