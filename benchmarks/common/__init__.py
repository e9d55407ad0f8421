"""What several benchmarks share: jobs under mpirun, results of jobs as figures, where a result comes from."""
