# cython: language_level=3, binding=False, boundscheck=False, wraparound=False
"""Reading, writing and waiting for events without an object for each, and without letting go of the interpreter.

`link` and `readers` use this where it has been compiled. Sockets never block here, so a system call takes a
microsecond: to release the interpreter's lock around it costs a good part of that, and where another thread of
the process is busy, to get it back takes up to five milliseconds.
"""

from time import monotonic

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.exc cimport PyErr_SetFromErrno
from posix.unistd cimport close

cdef extern from "<sys/epoll.h>" nogil:
    enum:
        EPOLLIN
        EPOLL_CLOEXEC
        EPOLL_CTL_ADD
        EPOLL_CTL_DEL
    ctypedef union epoll_data_t:
        int fd
    struct epoll_event:
        unsigned int events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epoll, int operation, int file, epoll_event* event)
    int epoll_wait(int epoll, epoll_event* events, int most, int timeout)

cdef extern from "<sys/socket.h>" nogil:
    enum:
        MSG_NOSIGNAL
    Py_ssize_t recv(int file, void* room, size_t size, int flags)
    Py_ssize_t send(int file, const void* data, size_t size, int flags)

cdef enum:
    LONGEST = 1 << 16
    AT_ONCE = 1024
    MANY = 8

cdef char room_for_all[LONGEST]


def read_some(int file, Py_ssize_t room):
    """As `os.read`, of a socket: to read it as a file takes the system a tenth longer. At most 64 KiB."""
    cdef Py_ssize_t count = recv(file, room_for_all, min(room, <Py_ssize_t>LONGEST), 0)
    if count < 0:
        PyErr_SetFromErrno(OSError)
    return PyBytes_FromStringAndSize(room_for_all, count)


def write_some(int file, data not None):
    """As `os.write`, to a socket."""
    cdef Py_buffer view
    cdef Py_ssize_t count
    if PyBytes_CheckExact(data):  # nearly always: a view costs as much as the rest of this
        count = send(file, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), MSG_NOSIGNAL)
    else:
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        count = send(file, view.buf, view.len, MSG_NOSIGNAL)
        PyBuffer_Release(&view)
    if count < 0:
        PyErr_SetFromErrno(OSError)
    return count


cdef class Readers:
    """As `readers.Readers`."""

    cdef object _loop, _turn
    cdef list _callbacks  # by descriptor; None where nobody is to be called
    cdef int _epoll

    def __cinit__(self):
        self._epoll = -1

    def __dealloc__(self):
        self.close()

    def __init__(self, loop):
        self._loop = loop
        self._turn = loop.turn
        self._callbacks = []
        self._epoll = epoll_create1(EPOLL_CLOEXEC)
        if self._epoll < 0:
            PyErr_SetFromErrno(OSError)

    def fileno(self):
        return self._epoll

    def watch(self, int file, callback):
        cdef epoll_event event
        if file < 0:
            raise ValueError("a file that is closed")
        while len(self._callbacks) <= file:
            self._callbacks.append(None)
        known = self._callbacks[file] is not None
        if known == (callback is not None):
            self._callbacks[file] = callback
            return
        event.events = EPOLLIN
        event.data.fd = file
        if epoll_ctl(self._epoll, EPOLL_CTL_DEL if known else EPOLL_CTL_ADD, file, &event) < 0:
            PyErr_SetFromErrno(OSError)
        self._callbacks[file] = callback

    def call_back(self):
        cdef epoll_event events[AT_ONCE]
        cdef int index, count = MANY, total = 0
        while count >= MANY and total < AT_ONCE:
            self._turn.now = monotonic()
            count = epoll_wait(self._epoll, events, AT_ONCE, 0)
            for index in range(count):
                callback = self._callbacks[events[index].data.fd]
                if callback is not None:  # it may be gone by now, because of one before it
                    callback()
            total += count
            self._loop.end_turn()

    cpdef close(self):
        if self._epoll >= 0:
            close(self._epoll)
            self._epoll = -1
