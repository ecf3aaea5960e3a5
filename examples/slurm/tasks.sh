#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8       # each task is one rank
#SBATCH --gpus-per-node=8         # not --gpus-per-task: each rank sees all GPUs, and takes that of its LOCAL_RANK
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue --open-mode=append
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
exec srun rallypoint run --tasks train.py
