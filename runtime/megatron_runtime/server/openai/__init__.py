"""The OpenAI API: request schemas, routes, and the generation of answers."""
