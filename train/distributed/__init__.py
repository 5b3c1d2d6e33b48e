"""Several processes that train one model: ranks, what they tell one another, how a model is spread over them."""
