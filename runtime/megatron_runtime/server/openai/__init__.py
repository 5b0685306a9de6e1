"""The OpenAI API: request schemas, endpoints, and the generation behind them."""
