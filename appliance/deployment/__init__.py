"""Deployment files computed from a plan: Kubernetes objects and Docker Compose (`slipway render`)."""
