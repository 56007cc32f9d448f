"""The OpenAI-compatible HTTP API: request models, responses, errors and routes. Knows nothing of Ray or of tensors."""
