"""`rallypoint torch`: `check` looks for the libuv server in a build, `plan` and `watch` help to build it.

Nothing here loads a library or imports torch: files are read, so that a build for Windows or macOS can be
judged on Linux and the other way round. What is printed is in `cli`.

How the server gets into torch, by its sources of 2.1 to about 2.9: the macro TORCH_USE_LIBUV at compile time.
torch's CMake files define it where USE_DISTRIBUTED and USE_TENSORPIPE are on and the compiler is not MSVC,
with the libuv that TensorPipe carries. USE_LIBUV is something else: an option of gloo, for its transport.
"""
