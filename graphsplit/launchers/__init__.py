"""Jobs whose processes somebody else's launcher has started: torchrun, srun, mpirun, Kubernetes."""
