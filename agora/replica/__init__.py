"""One stage among its replicas: how they agree on steps, gradients and weights."""
