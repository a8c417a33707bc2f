"""Training of workloads: pipelines, their losses and gradients beside unpartitioned torch."""
