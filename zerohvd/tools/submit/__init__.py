"""Job scripts for Slurm, PBS and LSF. `scripts` writes them, `zerohvd submit` hands them in."""
