"""Jobs that outlived what looks like a failure, each beside one that looks alike and died of it.

All texts are made up. What tells the two apart is never the error itself: it is what came after it.
"""

from __future__ import annotations

import pytest

from explaining import log_of_text, traceback
from rallypoint.diagnose.explain import Explanation, explain

pytestmark = pytest.mark.windows

_BANANA = "ValueError: the learning rate is a banana"
_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
_RAISED = traceback(_BANANA)
_STEPS = "step 11 loss 0.5\nstep 12 loss 0.4\n"
_BAR = "epoch:  20%|##   | 2/10 [00:02<00:08,  1.00s/it]\nbatch:  50%|##   | 5/10 [00:02<00:08,  1.00s/it]\n"
_THREAD = "Exception in thread Thread-5:\n" + traceback("EOFError").replace("in train", "in _bootstrap_inner")
_FEEDER = traceback("BrokenPipeError: [Errno 32] Broken pipe").replace("in train", "in _feed")
_TEE = traceback(_BANANA, "[default1]:")
_RESET = traceback("ConnectionResetError: [Errno 104] Connection reset by peer")
_LACK = traceback("ModuleNotFoundError: No module named 'triton'")
_CLIENT_GONE = _RESET.replace("in train", "in _call_connection_lost")
_KILLED = "W1115 14:36:19.1 7 torch/x.py:8] Received Signals.SIGTERM death signal, shutting down workers\n"
_CANCELLED = "step 9 loss 1\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-02-02T02:02:02 ***\n"
_REFUSED = "ssh: connect to host worker-0 port 22: Connection refused\n"
_SUMMED_UP = "wandb: Run summary:\nwandb:  loss 1.88\nwandb:  acc 0.5\nwandb: Synced 5 W&B file(s)\n"
_READY = "INFO:     Application startup complete.\n"
_ANSWERS = 'INFO:     10.0.0.1:4711 - "POST /v1/completions HTTP/1.1" 200 OK\n' * 2
_PROBES = 'INFO:     10.0.0.1:4711 - "GET /health HTTP/1.1" 200 OK\n' * 5
_SHUT = "INFO:     Shutting down\nINFO:     Application shutdown complete.\n"
_DEAD = traceback("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
_ROWS = "| Allocations   |   601   |   612   |\n| Active allocs |   602   |   613   |\n"
_UPLOADS = "a.pt: 100%|##| 3/3 [00:01<00:00,  2.1it/s]\nb.pt: 100%|##| 7/7 [00:01<00:00,  5.1it/s]\n"
_LOADS = "agent: load 0.5 of 8 cores\nagent: load 0.4 of 8 cores\nagent: load 0.1 of 8 cores\n"
_WAITS = "Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 3 reqs\n" * 3
_RUNS = _WAITS.replace("Running: 0 reqs, Waiting: 3", "Running: 3 reqs, Waiting: 0")
_SHARDS = "Loading shards: {0}% Completed | {0}/100 [00:01<00:09, 1.10it/s]\n"
_BYE = "".join(f"rank {rank} of 300 says good-bye\n" for rank in range(300))
_POOL = "Process ForkPoolWorker-1:\n" + traceback("BrokenPipeError: [Errno 32] Broken pipe")
_WATCHDOG = "[E1115 14:36:19.1 ProcessGroupNCCL.cpp:6] Watchdog caught collective operation timeout\n"
_OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the tasks were killed.\n"
_EXITED = "srun: error: n1: task 0: Exited with exit code 1\n"
_RANKS = "".join(f"rank {rank} of 1000 is ready\n" for rank in range(1000))
_SETTINGS = "".join(f"setting {name} is on\n" for name in "abcdefghij")
_SERVED = "10.0.0.1 5e5f /v1/chat/completions default proxy.py:1005 - POST 200 7379.8ms\n" * 2
_PROBED = "10.0.0.1 5e5f /-/healthz default proxy.py:1005 - GET 200 3.1ms\n" * 2
_BY_TORCH = "[rank0]:E0801 09:14:41.3 4711 torch/_inductor/x.py:2274] [0/0] "
_BAD_REQUEST = traceback("httptools.parser.errors.HttpParserInvalidMethodError: Invalid method encountered")
_LEFT = (
    "ERROR 01-16 17:16:49 [core_client.py:605] "
    "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.\n"
)
_PROMPTS = "Processed prompts: 100%|##| 4/4 [00:00<00:00,  5.14it/s]\n"
_TRACKER = traceback("KeyError: '/loky-7'", file="/lib/multiprocessing/resource_tracker.py")
_RVC = traceback("ProcessExitedException: process 0 terminated with exit code 149")
_TRAINED = _STEPS + "Training completed.\n"
_TRIALS = "Number of trials: 2 ({'TERMINATED': 2})\n"
_NO_ERROR = '{"level": "info", "step": 1, "loss": 0.5, "error": null, "failed": 0}\n'

_PAIRS: dict[str, tuple[str, ...]] = {
    "a server has loaded": (
        _READY + "Loading weights\nModel loaded in 3.9s (weights: 0.6s)\n",
        _READY + "Loading model on 8 workers\nworker 0: weights loaded in 4 shards\n",
    ),
    "exported": (
        "a warning\nExported model to a.onnx\n",
        "a warning\nExported environment: NCCL_DEBUG=INFO\n",
    ),
    "a caught exception": (_RAISED + _STEPS, _STEPS + _RAISED),
    "a line on its way": (_RAISED + _STEPS, _RAISED + "step 11 loss 0.5\n"),
    "one step told by many": (_RAISED + _STEPS, _RAISED + "step 11 loss 0.5\nstep 11 loss 0.6\n"),
    "bars drawn again": (_BAR + _RAISED + _BAR.replace(" 5/", " 6/") + _STEPS, _BAR + _RAISED + _BAR),
    "a smaller batch": (
        traceback(_MEMORY) + "Decreasing batch size to 32\nepoch 0: loss 1.1\nepoch 1: loss 0.9\n",
        "epoch 0: loss 1.1\nCUDA out of memory, retrying with batch size 16\n" + traceback(_MEMORY),
    ),
    "wandb sums up": (
        _RAISED + "wandb: Waiting for W&B process to finish... (success).\n",
        "step 1 loss 0.5\n" + _RAISED + _SUMMED_UP,
    ),
    "saved at the end": (
        _RAISED + _STEPS + "Saved checkpoint at step 12\n",
        "step 11 loss 0.5\n" + _RAISED + "Saved emergency checkpoint at step 11\nShutdown complete\n",
    ),
    "words of the shell": (
        _RAISED + _STEPS + "Job finished\n",
        _RAISED + "Job finished\nTraining complete\n",
    ),
    "preempted": (
        _CANCELLED + "Resuming from ckpt/step_9.pt\n" + _STEPS,
        _CANCELLED + "saving checkpoint at step 9\nsaved ckpt/step_9.pt\n",
    ),
    "the last steps of a job that was ended": (
        _CANCELLED + "Resuming from ckpt/step_9.pt\n" + _STEPS,
        _CANCELLED + _STEPS,
    ),
    "a thread": (_STEPS + _THREAD + "Best model saved\n", _STEPS + _THREAD),
    "the exit": (_STEPS + "Training finished\n" + _FEEDER, _STEPS + _FEEDER),
    "told to end": ("Training finished, loss 0.2\n" + _KILLED, _STEPS + _KILLED),
    "told to end, and saved": (
        _STEPS + "Reached max_steps\nSaved model\n" + _KILLED,
        _STEPS + "epoch 3 done\n" + _KILLED + "Saved checkpoint\ndone\n",
    ),
    "peers that go after the end": (
        _STEPS + "Training finished\n" + _RESET,
        _STEPS + "Training finished\n" + _RESET + "srun: error: a: task 0: Exited with exit code 1\n",
    ),
    "peers that go after an epoch": (_RESET + _STEPS, _STEPS + "Epoch 3 complete\n" + _RESET),
    "done with the start": (_STEPS + "done\n" + _RESET, "compiling\ndone\n" + _RESET),
    "peers that go after a part": (
        _STEPS + "Finished training of the student\n" + _RESET,
        _STEPS + "Training finished iteration 12 at 10:11\n" + _RESET,
    ),
    "said after the end": (
        "{'train_runtime': 9.1, 'train_loss': 0.5}\n100%|##| 9/9 [00:09<00:00,  1.0it/s]\nERROR: x is gone\n",
        "{'train_runtime': 9.1, 'train_loss': 0.5}\nERROR: cannot write model.pt: quota\n",
    ),
    "an error stated": (
        _STEPS + "ERROR: upload: 503\nTraining finished\n",
        _STEPS + "ERROR: upload: 503\nShutdown complete\n",
    ),
    "killed by the system": (
        "Killed subprocess 7 after 30 s, clip skipped\n" + _STEPS,
        _STEPS + "run.sh: line 3: 2211 Killed                  python train.py\nAll scripts done\n",
    ),
    "behind a tee": (
        _TEE + "[default1]:step 1 loss 2\n[default1]:step 2 loss 1\n",
        _TEE + "[default0]:step 1 loss 2\n[default0]:step 2 loss 1\n",
    ),
    "a tee of torchrun with torch's own words": (
        traceback(_BANANA, "[rank1]:") + "[rank1]:step 1 loss 2\n[rank1]:step 2 loss 1\n",
        traceback(_BANANA, "[rank1]:") + "[rank0]:step 1 loss 2\n[rank0]:step 2 loss 1\n",
    ),
    "source code of a rank that is gone": (
        _RAISED + _STEPS,
        traceback(_BANANA, "[rank1]: ").replace("step()", "loss = 0.5; step = 1") + _STEPS,
    ),
    "parts of an epoch": (
        _RAISED + "{'loss': 2.1, 'epoch': 0.1}\n{'loss': 2.0, 'epoch': 0.2}\n",
        _RAISED + "{'loss': 2.1, 'epoch': 0.1}\n{'eval_loss': 2.0, 'epoch': 0.1}\n",
    ),
    "before the first step": (_REFUSED * 3 + "pi is approximately 3.14\n", _STEPS + _REFUSED * 3),
    "JSON": (_NO_ERROR * 3, _NO_ERROR + '{"level": "error", "msg": "write failed: disk full"}\n'),
    "tests": (
        "tests/t.py::test_connection_error PASSED\n==== 12 passed, 1 skipped, 1 xfailed in 4.20s ====\n",
        "tests/t.py::test_connection_error FAILED\n==== 1 failed, 12 passed in 4.20s ====\n",
    ),
    "counts": (
        "docs:  22%|##   | 220/1000 [00:40<02:22, 54.81docs/s, errors=5, failed=0]\n",
        "220 docs read\nERROR: 1000 documents could not be read\n",
    ),
    "exit codes": (
        "worker 0 exited with code 0\nworker 1 exited with code 0\n",
        "worker 0 exited with code 1\nworker 1 exited with code 0\n",
    ),
    "results": ("Rank 0 has data 3.0\nRank 1 has data 3.0\n", "rank 0 ready\nwaiting for rank 1\n"),
    "settings": (
        "Namespace(epochs=10, lr=0.1)\nepoch 1 accuracy 0.5\n",
        "Namespace(epochs=10, lr=0.1)\ninitializing process group\n",
    ),
    "a bar at 0": ("  1%|    | 1/1218 [00:09<3:00:00, 9.1s/it]\n", "  0%|    | 0/1218 [00:00<?, ?it/s]\n"),
    "a server that starts": (
        "loading scripts\n" + _RAISED + "Running on local URL:  http://127.0.0.1:7860\n",
        "Running on local URL:  http://127.0.0.1:7860\n" + _RAISED,
    ),
    "what is summed up at the end": (_STEPS + _RAISED + _STEPS, _STEPS + _RAISED + _ROWS),
    "what others count": (_LOADS + _RAISED + _STEPS, _LOADS + _STEPS + _RAISED + _LOADS + _UPLOADS),
    "requests": (_READY + _RAISED + _ANSWERS, _READY + _RAISED + _PROBES),
    "an engine that is dead": (_DEAD + _READY + _ANSWERS, _DEAD + _PROBES + _ANSWERS + _PROBES),
    "an engine that dies again": (_DEAD + _READY + _ANSWERS, _READY + _DEAD + _READY + _DEAD + _ANSWERS),
    "what another process says": (
        traceback(_BANANA, "(Server pid=1) ") + _ANSWERS.replace("INFO:", "(Server pid=1) INFO:"),
        traceback(_BANANA, "(Engine pid=7) ") + _ANSWERS.replace("INFO:", "(Server pid=1) INFO:"),
    ),
    "a process of multiprocessing": (_RAISED + _READY, f"Process SpawnProcess-1:\n{_RAISED}{_READY}"),
    "a server that is told to end": (_READY + _ANSWERS + "^C\n" + _SHUT, _STEPS + "^C\n"),
    "signals": (
        f"{_READY}{_ANSWERS}Signal (15) received.\n{_SHUT}",
        f"{_READY}{_ANSWERS}Signal (11) received.\n{_SHUT}",
    ),
    "a server that ends": (_READY + _ANSWERS + _SHUT, _READY + _ANSWERS + _RAISED + _SHUT),
    "requests that wait": (_READY + _WAITS + _ANSWERS, _READY + _ANSWERS + _WAITS),
    "requests that nobody works on": (_READY + _RUNS + _ANSWERS, _READY + _ANSWERS + _RUNS),
    "a bad request": tuple(
        f'{_READY}{_RAISED}INFO:     10.0.0.1:4711 - "POST /v1/completions HTTP/1.1" {code}\n'
        for code in ("400 Bad Request", "500 Internal Server Error")
    ),
    "what follows when a server is told to end": (
        f"{_READY}{_ANSWERS}SIGTERM received. Draining requests...\nERROR: x failed\n{_DEAD}{_SHUT}",
        f"{_READY}{_ANSWERS}ERROR: x failed\n{_DEAD}SIGTERM received. Draining requests...\n{_SHUT}",
    ),
    "what is loaded": (_SHARDS.format(50) + _STEPS, _SHARDS.format(50) + _SHARDS.format(100)),
    "many ranks at the end": (_RAISED + _STEPS + _BYE, _STEPS + _RAISED + _BYE),
    "a pool whose program is gone": (_STEPS + "Model saved\n" + _POOL, _STEPS + _POOL),
    "told to end, by a launcher": (
        _STEPS + "Training finished\n[INFO] Main process received SIGINT, exiting\n",
        _STEPS + "[INFO] Main process received SIGINT, exiting\n",
    ),
    "what a tracker complains of": (
        _STEPS + "wandb: ERROR the API has timed out\nwandb: Synced 5 file(s)\n",
        _STEPS + "uploader: ERROR the API has timed out\nuploader: Synced 5 file(s)\n",
    ),
    "a warning before a traceback": (
        "[2024-02-02 02:02:02,002] [INFO] [data.py:8:load] skipped a sample\n" + _RAISED + _STEPS,
        "[2024-02-02 02:02:02,002] [INFO] [logging.py:8:log] step=3, skipped=0\n" + _RAISED,
    ),
    "what was said before further steps": (
        f"{_STEPS}a full disk: writes may fail\nstep 13 loss 0.3\na full disk: writes may fail\n",
        f"{_STEPS}a full disk: writes may fail\n",
    ),
    "a rank that is told apart": (
        _WATCHDOG + _STEPS,
        f"[rank3]:{_WATCHDOG}{_STEPS}",
    ),
    "killed by Slurm": (
        _OOM + "Resuming from ckpt/step_9.pt\n" + _STEPS,
        _OOM + _STEPS,
    ),
    "steps long after": (_EXITED + _STEPS + _RANKS + _STEPS, _EXITED + _STEPS),
    "the end of something": ("data is ready\nall results are saved\n", f"data is ready\n{_SETTINGS}"),
    "what is prepared": (
        "Map: 100%|##| 9/9 [00:01<00:00, 9.1 examples/s]\n" + _STEPS,
        "Map: 100%|##| 9/9 [00:01<00:00, 9.1 examples/s]\nworkers have joined\n",
    ),
    "what is downloaded": (
        "model.bin: 100%|##| 4.26G/4.26G [03:38<00:00, 19.5MB/s]\n" + _STEPS,
        "model.bin:  76%|# | 3.25G/4.26G [02:45<00:51, 19.7MB/s]\n",
    ),
    "NCCL is connected": (
        "n1:7:7 [0] NCCL INFO Init COMPLETE\nall ranks are done\n",
        "ranks are done with the start\n" + "n1:7:7 [0] NCCL INFO Init COMPLETE\n" * 3,
    ),
    "what was loaded": (
        "saving...\nDone (t=3.6s)\n",
        "loading annotations...\nDone (t=3.6s)\nindex created!\n",
    ),
    "what is being done": ("data is ready\nsaved a.pt\n", "data is ready\nRunning the training on n1\n"),
    "Slurm's book-keeping": (
        _STEPS + "slurmstepd: error: _is_a_lwp: open() /proc/7/status failed\nsaved a.pt\n",
        _STEPS + "slurmstepd: error: open() /proc/7/status failed\nsaved a.pt\n",
    ),
    "a process that others outlive": (
        "worker 3 died unexpectedly\nRestarting worker 3\n" + _STEPS,
        "worker 3 died unexpectedly\n" + _STEPS,
    ),
    "a console of Windows": (
        _STEPS + "Training finished\nPress any key to continue . . .\n",
        _STEPS + "Press any key to continue . . .\n",
    ),
    "an editor's console": (
        _STEPS + "Process finished with exit code 0\n",
        _STEPS + "Process finished with exit code -1073741819 (0xC0000005)\n",
    ),
    "at zero": ("Epoch 0 step 0\nEpoch 0 step 1\n", "Epoch 0 step 0\n"),
    "the last epoch, with its result": (
        f"Epoch 2/2 loss 0.5\nbest acc 0.9\n{_RESET}",
        f"Epoch 2/2\nbest acc 0.9\n{_RESET}",
    ),
    "the last epoch, in part": (
        "Epoch 2/2 loss 0.5\nsaved a.pt\nTerminated\n",
        "Epoch 2/2 batch 7 loss 0.5\nsaved a.pt\nTerminated\n",
    ),
    "what is due after the training": (
        _STEPS + "Training finished\nUploading a.pt\nUpload complete\nTerminated\n",
        _STEPS + "Training finished\nUploading a.pt\nTerminated\n",
    ),
    "an evaluation after the training": (
        _STEPS + "Training finished\n100%|##| 9/9 [00:01<00:00,  2.1it/s]\nTerminated\n",
        _STEPS + "Training finished\n 11%|# | 1/9 [00:01<00:08,  2.1it/s]\nTerminated\n",
    ),
    "a scheduler, after the end": (
        _STEPS + "Training finished\n" + _CANCELLED[16:],
        _STEPS + _CANCELLED[16:],
    ),
    "a timeout is no farewell": (
        _STEPS + "Training finished\n" + _RESET,
        _STEPS + "Training finished\n" + traceback("TimeoutError: Watchdog timed out waiting for rank 3"),
    ),
    "a helper of the script": (
        _STEPS + "run.sh: line 4: 88 Killed                  tensorboard --logdir runs\n" + _STEPS,
        _STEPS + "run.sh: line 4: 88 Killed                  python train.py\n" + _STEPS,
    ),
    "a server at work that is told to end": (_READY + _ANSWERS + "^C\n", _READY + "^C\n"),
    "early": (
        _STEPS + "Early stopping triggered\nTerminated\n",
        _STEPS + "EarlyStopping counter: 3 out of 9\nTerminated\n",
    ),
    "a tracker's upload": (
        _STEPS + "Training finished\nwandb: ERROR Failed to upload media.json\n",
        _STEPS + "Training finished\nERROR Failed to upload a.pt\n",
    ),
    "what was saved at an end": (
        _STEPS + "saved a.pt\n",
        _STEPS + "Received SIGTERM\nsaved a.pt\nbest acc 0.9\n",
    ),
    "tests that plan a failure": (
        f"test_a ... {_RAISED}ok\nRan 1 test in 0.1s\n\nOK\n",
        f"test_a ... {_RAISED}FAIL\nRan 1 test in 0.1s\n\nFAILED (failures=1)\n",
    ),
    "a server": (
        "INFO: Application startup complete.\nwaiting for requests\n",
        "Loaded in 11.5 seconds\nLoading extension module utils...\n",
    ),
    "a bar that has not moved": (
        _STEPS + "Testing:  10%|█         | 1/10 [00:01<00:09,  1.01it/s]\n",
        _STEPS + "Testing:   0%|          | 0/10 [00:00<?, ?it/s]\n",
    ),
    "a model that answers": (
        "Loading model\nGenerate:0.70s (22.5ms/T = 44.41T/s)\nOutput: three rivers.\n",
        "Loading model\nOutput: three rivers.\n",
    ),
    "a server of another kind": (
        "Loading\n[I 12:00:00 ServerApp] Use Control-C to stop this server and shut down all kernels\n",
        "Loading\nWaiting for other machines, press Ctrl+C to quit\n",
    ),
    "a task of celery": (
        "[2026-11-15 14:36:19,1: WARNING/MainProcess] CUDA out of memory\n" + _STEPS,
        "[2026-11-15 14:36:19,1: WARNING/ForkPoolWorker-1] torch.OutOfMemoryError: CUDA out of memory\n",
    ),
    "a bar of the next epoch": (
        "Epoch 0: 100%|###| 9/9 [00:05<00:00, 2.00it/s]\nEpoch 1:   0%|   | 0/9 [00:00<?, ?it/s]\n",
        "Epoch 0: 100%|###| 9/9 [00:05<00:00, 2.00it/s]\nTesting: 0it [00:00, ?it/s]\n",
    ),
    "a worker that was made again": (
        "A worker died or was killed\nRecreated failed worker with index 2\n" + _STEPS,
        "A worker died or was killed\n" + _STEPS,
    ),
    "a command that failed, and was not needed": (
        traceback("subprocess.CalledProcessError: Command '['cc']' returned non-zero exit status 1.")
        + _STEPS,
        _STEPS
        + traceback("subprocess.CalledProcessError: Command '['cc']' returned non-zero exit status 1."),
    ),
    "a task that only lost its client": (
        f"{_STEPS}[ERROR] Exception in callback f(None)\nhandle: <Handle f(None)>\n{_RESET}Done in 9.1 s\n",
        f"{_STEPS}[ERROR] Exception in f(None)\nhandle: <Handle f(None)>\n{_RESET}Done in 9.1 s\n",
    ),
    "what a launcher says at the end": (
        _STEPS + _EXITED + "Job 'raysubmit_7' succeeded\n",
        _STEPS + _EXITED + "Job 'cleanup' succeeded\nStarting upload of logs\nDone.\n",
    ),
    "what is not there": (
        "2024-04-16 20:32:52 WARNING  Triton is not available\n"
        + _LACK
        + _SETTINGS
        + "b\nc\nDone in 9.1 s\n",
        "2024-04-16 20:32:52 WARNING  Triton is not available\n"
        + _RAISED
        + _SETTINGS
        + "b\nc\nDone in 9.1 s\n",
    ),
    "an allocator that tries again": (
        _STEPS + "Allocator (GPU_0_bfc) ran out of memory trying to allocate 5.32GiB\n",
        _STEPS + "GPU 0 is out of memory\n",
    ),
    "an error that is a metric": (
        "epoch 1 train error: 0.25 lr 0.1\nepoch 2 train error: 0.24 lr 0.1\n",
        _RAISED
        + "step 1 store error: 10.0.0.4 did not answer\nstep 2 store error: 10.0.0.4 did not answer\n",
    ),
    "a client that is gone": (
        f"{_STEPS}| ERROR | asyncio | Exception in callback T._call_connection_lost(None)\n{_CLIENT_GONE}",
        f"{_STEPS}| ERROR | asyncio | Exception in callback T.step(None)\n{_RESET}",
    ),
    "what a file watcher finds": (
        f"Examining the path of torch.classes raised:\n{_RAISED}Done in 9.1 s\n",
        f"The start of the app raised:\n{_RAISED}Done in 9.1 s\n",
    ),
    "a count of failures": (
        _STEPS + "Summary:\n  - Successful Queries:  1\n  - Failed Queries:      0\n",
        _STEPS + "Summary:\n  - Successful Queries:  0\n  - Failed Queries:      1\n",
    ),
    "a group of the kernel": (
        "slurmstepd: error: unable to create cgroup '/sys/fs/a' : No space left on device\ndone in 9.1 s\n",
        "error: unable to create '/srv/a' : No space left on device\ndone in 9.1 s\n",
    ),
    "an answer of Ray Serve": (_RAISED + _SERVED, _RAISED + _PROBED),
    "all trials have ended": (
        "b\n" + _TRIALS,
        "b\n" + _TRIALS.replace("TERMINATED': 2", "RUNNING': 2"),
    ),
    "a kernel that torch has tried": (
        traceback(_BANANA, _BY_TORCH) + f"{_BY_TORCH}Ignoring this choice.\n{_STEPS}",
        traceback(_BANANA, _BY_TORCH) + _STEPS,
    ),
    "an engine that leaves a script that is done": (
        _PROMPTS + "tensor([[1.0, 0.7]])\n" + _LEFT,
        _PROMPTS + "Processed prompts:   0%|  | 0/4 [00:00<?, ?it/s]\n" + _LEFT,
    ),
    "what a logger could not write": (
        "=== 1 passed in 6.8s ===\n--- Logging error ---\n" + _RAISED,
        "=== 1 passed in 6.8s ===\n--- Loading ---\n" + _RAISED,
    ),
    "metrics that nobody gets": (
        "[2025-12-03 10:22:16,447 E 8 9] a.cc:8: failed to connect. Metrics will not be exported.\nDone.\n",
        "[2025-12-03 10:22:16,447 E 8 9] a.cc:8: failed to connect. The worker is lost.\nb\nc\nd\n",
    ),
    "a server that was told to end": (
        _READY + _ANSWERS + _SHUT + _DEAD + _SHUT,
        _READY + _ANSWERS + _DEAD + _SHUT,
    ),
    "a code for a good end": (
        _STEPS + "Training is done. The program is closed.\n" + _RVC,
        _STEPS + "Not enough data present in the training set.\n" + _RVC,
    ),
    "a process that Python starts": (
        _TRAINED + _TRACKER.replace("in train", "in main"),
        _TRAINED + _TRACKER,
    ),
    "what is deleted": (_TRAINED + _RAISED.replace("in train", "in __del__"), _TRAINED + _RAISED),
    "what is no HTTP": (
        _ANSWERS + _BAD_REQUEST + _ANSWERS[: len(_ANSWERS) // 2],
        _ANSWERS + _RAISED + _ANSWERS[: len(_ANSWERS) // 2],
    ),
    "a port that is no status": (
        _DEAD.replace("vllm.v1.engine.exceptions.EngineDeadError", "ValueError") + _ANSWERS,
        _RAISED + '10.0.0.234:44056 - "GET /generate HTTP/1.1" 503 Service Unavailable\n' * 3,
    ),
    "a page that is not there": (
        _RAISED + 'INFO:     10.0.0.1:4711 - "POST /v1/completions HTTP/1.1" 400 Bad Request\n',
        _RAISED + 'INFO:     10.0.0.1:4711 - "POST /v2/completions HTTP/1.1" 404 Not Found\n',
    ),
    "a module that is missed once": (
        _LACK + "looking for another one\nfound another one\nit will do\n" + _STEPS,
        _LACK + "looking for another one\nfound another one\nit will do\n" + _STEPS + _LACK,
    ),
    "frames of a traceback are no steps": (
        _RAISED + _STEPS,
        _RAISED + "".join(f'  File "/lib/python3.9/x.py", line {number}, in x\n' for number in range(1, 5)),
    ),
    "what a profiler and a shell have measured": (
        "a warning\nSelf CPU time total: 1.884s\n",
        "a warning\nretrying in 0.492115 seconds\n",
    ),
    "a value that overflowed": (
        "step 1 loss nan\nstep 2 loss inf\n" + _STEPS.replace("11", "3").replace("12", "4"),
        _STEPS + "step 13 loss nan\nstep 14 loss=inf\nstep 15 loss: nan\n",
    ),
    "the loss of what is not trained": (
        "".join(f"epoch {number} loss 0.{number} val_loss nan\n" for number in range(1, 5)),
        "".join(f"epoch {number} loss nan val_loss 0.{number}\n" for number in range(1, 5)),
    ),
    "what pip says of other packages": (
        "ERROR: pip's dependency resolver does not currently\nSuccessfully installed x\n",
        "ERROR: Could not build wheels for x, which is required to install pyproject.toml-based projects\n",
    ),
}


def _explained(text: str) -> Explanation:
    return explain([log_of_text(text)])


@pytest.mark.parametrize("name", _PAIRS)
def test_what_a_job_outlived_is_told_from_what_it_died_of(name: str) -> None:
    outlived, died = map(_explained, _PAIRS[name])
    assert (outlived.found, outlived.verdict) == (False, None)
    assert died.found


_LAST_WORDS = (
    "##[error]Process completed with exit code 137.",
    "{local_task_job.py:102} INFO - Task exited with return code Negsignal.SIGKILL",
    "=   EXIT CODE: 9",
    "make: *** [Makefile:12: train] Error 1",
    "[1]+  Exit 137                nohup python train.py",
    "job 4711 exceeded hard wallclock time",
    "Connection to gpu-box closed by remote host.",
    "Your notebook tried to allocate more memory than is available. It has restarted.",
    "Received SIGTERM, exiting",
    "Traceback (most recent call last):",
    "Lost connection to worker 3",
    "WARNING:root:kernel 64d26b43-fec6-4352-bdc2-0a820f7219c6 restarted",
    "[TP1] Watchdog timeout (self.watchdog_last_forward_ct=0)",
    "段错误 (核心已转储)",
)


@pytest.mark.parametrize("words", _LAST_WORDS)
def test_words_of_an_end_behind_the_last_step_are_no_good_news(words: str) -> None:
    died = _explained(f"{_STEPS}{words}\n")
    assert died.verdict is not None or died.suspects or (died.stop is not None and died.stop.line == 3)
    assert not _explained(f"step 1 loss 0.5\n{words}\n{_STEPS}").found


_PROGRESS = {
    "values": "fwd 0.11{0} bwd 0.2{0}",
    "a table": "    {0}   1.{0}1   0.0{0}  ok",
    "another language": "第 {0} 轮, 损失: 0.{0}",
    "returns": "global_step={0}024, episodic_return=2{0}.0",
    "costs": "Ep. 1 : Up. {0}000 : Cost 5.{0} : Time 6{0}.11s",
    "Megatron": " iteration       {0}/  500 | elapsed (ms): 1.1 | number of skipped iterations:   0 |",
    "an epoch in parts": "{{'loss': 2.{0}, 'epoch': 0.{0}}}",
    "timm": "Train: {0} [  50/1251 (  4%)]  Loss: 6.9",
    "rounds": "fit_round {0} received 10 results and 0 failures",
}
_REPEATED = {
    "waits": "waiting for rank 3 since {0}0.5 s",
    "warnings": "WARNING: no heartbeat for {0}0.5 s",
    "tries": "attempt {0} ended after 1.{0} s",
    "what each GPU has": "GPU {0}: 12.{0} GiB in use",
    "what each rank has": "[rank {0}] peak 12.{0} GiB",
    "frames": "frame #{0}: c10::x() (0x7.{0} in lib.so)",
    "shards": "Loading shard {0}/9: 1.{0} GB",
    "what stays as it is": "util 0.5 mem 12.3",
}


def _lines(form: str, *numbers: int) -> str:
    return "".join(form.format(number) + "\n" for number in numbers)


@pytest.mark.parametrize("name", _PROGRESS)
def test_steps_are_known_by_their_rhythm_in_any_words(name: str) -> None:
    before, after = _lines(_PROGRESS[name], 1, 2, 3), _lines(_PROGRESS[name], 4, 5)
    assert not _explained(before + _RAISED + after).found
    assert not _explained(before).found
    assert _explained(before + _RAISED).found
    assert _explained(before + _RAISED + _lines(_PROGRESS[name], 4)).found


@pytest.mark.parametrize("name", _REPEATED)
def test_what_a_dead_job_repeats_is_no_rhythm(name: str) -> None:
    repeated = _lines(_REPEATED[name], *range(1, 9))
    assert _explained(_STEPS + _RAISED + repeated).found
    assert _explained("initializing\n" + repeated + "initializing\n").found


def test_what_a_job_outlived_is_not_the_cause_of_its_end() -> None:
    """Unless nothing else can be: others may have gone on for a moment without the rank that failed."""
    caught = traceback("KeyError: 'caught'")
    report = _explained(caught + _STEPS + _RAISED)
    assert report.verdict is not None
    assert report.verdict.incident.headline == _BANANA
    assert [(told.headline, told.role) for told in report.notices] == [("KeyError: 'caught'", "notice")]
    lost = _explained(
        caught + _STEPS + "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:9952.\n"
    )
    assert lost.verdict is not None
    assert lost.verdict.incident.headline == "KeyError: 'caught'"


_LACK = traceback("ModuleNotFoundError: No module named 'flash_attn'")
_STEPPED = "step 9 loss 0.7\nstep 10 loss 0.6\n" + _STEPS


@pytest.mark.parametrize(
    "log",
    [
        # what a batch script says at its end, and other ranks say, is not the program that lacks a module
        _LACK + "copying the logs to the bucket\nhost gpu01 was used\nlogs are in the folder logs\nDone\n",
        traceback("ModuleNotFoundError: No module named 'flash_attn'", "[rank0]: ") + "a\nb\nc\nd\nDone\n",
        traceback("ModuleNotFoundError: No module named 'flash_attn'", "[default0]:")
        + "".join(f"[default1]:part {each} is built\n" for each in "abcd")
        + "[default1]:model is ready\n",
        # what is not tried again
        "Got a non-retryable error, giving up\n" + _RAISED,
        "WARNING connection broken, 2 retries left\n" + _RAISED,
        _STEPPED + "ERROR: worker failed, the error is not retryable\n",
        # how a job was ended, in words of its own
        *(
            f"{_STEPPED}Training {end}\n"
            for end in ("interrupted.", "interrupted by SIGTERM", "was interrupted by a lost node")
        ),
        # a part that is done, and a peer that is gone
        f"{_STEPPED}100 of 100 batches done\n{_RESET}",
        # a program that hangs behind its settings, or in a command
        *(
            f"building the model\n{last}\n"
            for last in (
                ">>> torch.distributed.init_process_group('nccl')",
                "Output directory: '/data/out'",
                "Total trainable parameters 124439808",
                "[0, 1, 2, 3]",
                "16/16 processed",
                "│ 1 │ 8 │ 80 │",
            )
        ),
        _STEPPED
        + "FATAL: rank 3 lost its device\nWARNING: a lock\n"
        + _RAISED.replace(_BANANA, "OSError: lock"),
        _STEPPED + "worker_error: 1.0 lost\n",
    ],
    ids=lambda log: log[-40:],
)
def test_what_only_sounds_like_a_good_end_is_none(log: str) -> None:
    assert explain([log_of_text(log)]).found


def test_a_command_that_is_missing_is_no_cause_if_the_script_goes_on() -> None:
    head = "slurm_script: line 5: module: command not found\n" + "".join(
        f"{each} is set\n" for each in "abcdefg"
    )
    report = explain([log_of_text(head + _RAISED)])
    assert report.verdict is not None
    assert report.verdict.incident.title == _BANANA


def test_what_is_raised_since_a_module_is_needed_leaves_that_the_cause() -> None:
    joint = "\nDuring handling of the above exception, another exception occurred:\n\n"
    report = explain([log_of_text(_LACK + joint + traceback("RuntimeError: this trainer needs flash_attn"))])
    assert report.verdict is not None
    assert report.verdict.incident.raised is not None
    assert report.verdict.incident.raised.name == "ModuleNotFoundError"
