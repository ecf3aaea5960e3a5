"""Ranks forked from a template: a process that has imported torch once, for all ranks of a machine.

    agent ── forks ──> template ── forks ──> intermediate ── forks ──> rank
      └──────────────── is the parent, once the intermediate exits ─────┘

The agent forks the template while it still has a single thread (`template.start_template`), and asks it over
a socket pair for each rank. The template forks an intermediate process, which forks the rank and exits. For
that moment the agent is a child subreaper, so it becomes the rank's parent: it waits for the rank, signals it
and sees its exit status exactly as if it had started it. `fresh_process` then turns the fork into what
`python -u SCRIPT` would be.

The template has one thread, no CUDA context and no socket but its own. It ends when the agent does, since its
socket then ends. What would make a fork unsafe is checked before each one (`preloading.why_unsafe`); the
caller starts the rank in the ordinary way then. Linux only.

What the ranks have imported when their process group was up is imported for the next attempt, while they
train: the template forks a successor that imports it and takes over. An import that makes forks unsafe costs
the successor only.
"""
