#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1       # one launcher on each machine, which starts a rank for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64        # for all ranks of a machine together
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300         # every rank hears SIGUSR1 five minutes before the end
#SBATCH --requeue --open-mode=append
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
exec srun rallypoint run train.py
