"""Endpoints that engines answer: models, adapters, and other requests without a transfer."""
