# cython: language_level=3, binding=False, boundscheck=False, wraparound=False
"""Accepting, reading, writing and waiting for events without an object for each.

`listening`, `link` and `loop` use this where it has been compiled. Sockets never block here, so a system call
takes a microsecond: to release the interpreter's lock around it costs a good part of that, and where another
thread of the process is busy, to get it back takes up to five milliseconds. So the lock is let go of only to
wait for events.
"""


from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport ENOMEM, errno
from libc.stdlib cimport free, realloc
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.types cimport pid_t
from posix.unistd cimport close, getpid

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

cdef extern from "<netinet/in.h>" nogil:
    enum:
        INET6_ADDRSTRLEN
        IPPROTO_TCP
    ctypedef struct in6_addr:
        pass
    ctypedef struct in_addr:
        pass
    struct sockaddr_in:
        unsigned short sin_port
        in_addr sin_addr
    struct sockaddr_in6:
        unsigned short sin6_port
        unsigned int sin6_flowinfo
        in6_addr sin6_addr
        unsigned int sin6_scope_id
    unsigned short ntohs(unsigned short)
    unsigned int ntohl(unsigned int)

cdef extern from "<netinet/tcp.h>" nogil:
    enum:
        TCP_KEEPIDLE

cdef extern from "<arpa/inet.h>" nogil:
    const char* inet_ntop(int family, const void* address, char* text, unsigned int size)

cdef extern from "<sys/socket.h>" nogil:
    enum:
        MSG_NOSIGNAL
        AF_INET
        AF_INET6
        SOCK_NONBLOCK
        SOCK_CLOEXEC
    struct sockaddr:
        pass
    struct sockaddr_storage:
        unsigned short ss_family
    int accept4(int file, sockaddr* address, unsigned int* size, int flags)
    int setsockopt(int file, int level, int option, const void* value, unsigned int size)
    Py_ssize_t recv(int file, void* room, size_t size, int flags)
    Py_ssize_t send(int file, const void* data, size_t size, int flags)

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_cond_init(pthread_cond_t*, void*)
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_broadcast(pthread_cond_t*)
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_detach(pthread_t)

cdef extern from "<signal.h>" nogil:
    ctypedef struct sigset_t:
        pass
    enum:
        SIG_SETMASK
    int sigfillset(sigset_t*)
    int pthread_sigmask(int, const sigset_t*, sigset_t*)

cdef extern from * nogil:
    enum:
        __ATOMIC_RELAXED
    int __atomic_fetch_add(int*, int, int)

cdef enum:
    LONGEST = 1 << 16
    AT_ONCE = 1024
    MANY = 8
    GATHERED = 128
    SHORT = 1 << 12
    WORTHWHILE = 32
    SHARE = 4

cdef char room_for_all[LONGEST]

cdef double BRISK_SECONDS = 20e-6


def accept_some(int listener, int most, int idle):
    """New sockets, each with the address of its client, and why there are no more: the system's error, or 0.

    They do not block, and are probed after `idle` seconds. The listener is one of TCP.
    """
    cdef sockaddr_storage address
    cdef unsigned int size
    cdef int file
    cdef list found = []
    while most:
        size = sizeof(address)
        file = accept4(listener, <sockaddr*>&address, &size, SOCK_NONBLOCK | SOCK_CLOEXEC)
        if file < 0:
            return found, errno
        setsockopt(file, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle))  # or the client has gone already
        try:
            found.append((file, address_of(&address)))
        except:
            close(file)
            for file, _ in found:
                close(file)
            raise
        most -= 1
    return found, 0


cdef object address_of(sockaddr_storage* address):
    """As `socket.accept` gives it."""
    cdef char text[INET6_ADDRSTRLEN]
    cdef sockaddr_in* four = <sockaddr_in*>address
    cdef sockaddr_in6* six = <sockaddr_in6*>address
    if address.ss_family == AF_INET:
        inet_ntop(AF_INET, &four.sin_addr, text, sizeof(text))
        return text.decode("ascii"), ntohs(four.sin_port)
    inet_ntop(AF_INET6, &six.sin6_addr, text, sizeof(text))
    host = text.decode("ascii")
    return host, ntohs(six.sin6_port), ntohl(six.sin6_flowinfo), six.sin6_scope_id


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


# Threads that help to send and to close. They know nothing of Python, and live as long as the process.

cdef struct Letter:
    int file
    const char* data  # or NULL: the file is to be closed
    size_t size
    Py_ssize_t sent  # or the system's error, negative

cdef struct Post:
    pid_t process
    int helpers
    pthread_mutex_t lock
    pthread_cond_t work
    pthread_cond_t rest
    Letter* letters
    int count
    int next  # the first letter that nobody has taken
    int round
    int busy
    bint is_open

cdef Post post


cdef inline void see_to(Letter* letter) noexcept nogil:
    if not letter.data:
        close(letter.file)
        return
    letter.sent = send(letter.file, letter.data, letter.size, MSG_NOSIGNAL)
    if letter.sent < 0:
        letter.sent = -errno


cdef void send_shares() noexcept nogil:
    """Take a few letters at a time, and see to them, until none is left."""
    cdef int index, stop
    while True:
        index = __atomic_fetch_add(&post.next, SHARE, __ATOMIC_RELAXED)
        if index >= post.count:
            return
        stop = min(index + SHARE, post.count)
        while index < stop:
            see_to(&post.letters[index])
            index += 1


cdef void* help_out(void* _) noexcept nogil:
    cdef int seen = 0
    pthread_mutex_lock(&post.lock)
    while True:
        while post.round == seen or not post.is_open:
            seen = post.round
            pthread_cond_wait(&post.work, &post.lock)
        seen = post.round
        post.busy += 1
        pthread_mutex_unlock(&post.lock)
        send_shares()
        pthread_mutex_lock(&post.lock)
        post.busy -= 1
        if not post.busy:
            pthread_cond_signal(&post.rest)


cdef void hire(int helpers) noexcept:
    """Have so many helpers, or as many as the system gives. A fork has none of its parent's."""
    cdef sigset_t every, before
    cdef pthread_t thread
    if post.process != getpid():
        memset(&post, 0, sizeof(post))
        post.process = getpid()
        pthread_mutex_init(&post.lock, NULL)
        pthread_cond_init(&post.work, NULL)
        pthread_cond_init(&post.rest, NULL)
    sigfillset(&every)  # signals are for Python's threads
    pthread_sigmask(SIG_SETMASK, &every, &before)
    while post.helpers < helpers and not pthread_create(&thread, NULL, help_out, NULL):
        pthread_detach(thread)
        post.helpers += 1
    pthread_sigmask(SIG_SETMASK, &before, NULL)


cdef void send_together(Letter* letters, int count) noexcept nogil:
    """Send them all. Whoever helps is done when this returns."""
    pthread_mutex_lock(&post.lock)
    post.letters = letters
    post.count = count
    post.next = 0
    post.round += 1
    post.is_open = True
    pthread_cond_broadcast(&post.work)
    pthread_mutex_unlock(&post.lock)
    send_shares()
    pthread_mutex_lock(&post.lock)
    post.is_open = False
    while post.busy:
        pthread_cond_wait(&post.rest, &post.lock)
    pthread_mutex_unlock(&post.lock)


cdef class Sending:
    """What links have to send in one turn, sent together; where it is for many, by several cores.

    Most of what a reply costs is the system's work to send it, and the system sends for several threads at a
    time. The caller waits for all of them, and keeps the interpreter's lock.
    """

    cdef Letter _letters[GATHERED]
    cdef list _senders  # a link and its data, for each letter
    cdef int _count, _helpers, _files
    cdef char* _is_gathered  # by descriptor

    def __cinit__(self, int helpers):
        self._senders = []
        self._helpers = helpers

    def __dealloc__(self):
        free(self._is_gathered)

    def put(self, link, int file, bytes data not None):
        """Send this before `flush` returns.

        If not all of it can be sent, the link keeps the rest (`was_sent`), and then goes on (`go_on`). What is long,
        and what comes behind something to the same file, is sent at once, by the link itself.
        """
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef Letter* letter
        if size > SHORT or file < 0 or (file < self._files and self._is_gathered[file]):
            self.flush()
            link.send_now(data)
            return
        if file >= self._files:
            self._make_room(file)
        self._senders.append((link, data))
        self._is_gathered[file] = True
        letter = &self._letters[self._count]
        letter.file = file
        letter.data = PyBytes_AS_STRING(data)
        letter.size = size
        self._count += 1
        if self._count == GATHERED:
            self.flush()

    def put_close(self, int file):
        """Close this file before `flush` returns."""
        cdef Letter* letter
        self.flush_of(file)
        self._senders.append((None, b""))
        letter = &self._letters[self._count]
        letter.file = file
        letter.data = NULL
        letter.size = letter.sent = 0
        self._count += 1
        if self._count == GATHERED:
            self.flush()

    def flush_of(self, int file):
        """As `flush`, if there is something to be sent to this file."""
        if file >= 0 and file < self._files and self._is_gathered[file]:
            self.flush()

    cpdef flush(self):
        """Send what has been put here."""
        cdef int index, count
        cdef Letter* letter
        cdef Py_ssize_t results[GATHERED]
        cdef list senders
        cdef bint is_whole
        error = None
        while self._count:
            senders, self._senders = self._senders, []
            count, self._count = self._count, 0
            self._see_to_all(count)
            is_whole = True
            for index in range(count):
                letter = &self._letters[index]
                if letter.data:
                    self._is_gathered[letter.file] = False
                results[index] = letter.sent
                if letter.sent != <Py_ssize_t>letter.size:
                    is_whole = False
                    link, data = senders[index]
                    try:
                        link.was_sent(data, letter.sent)
                    except BaseException as raised:
                        error = raised
                        results[index] = -ENOMEM
            if is_whole:
                continue
            # One that goes on may be closed, and others be sent something because of that, or be closed, too. So
            # each has kept its rest by now.
            for index in range(count):
                link, data = senders[index]
                if results[index] != PyBytes_GET_SIZE(data):
                    try:
                        link.go_on(results[index])
                    except BaseException as raised:
                        error = raised
        if error is not None:
            raise error

    cdef void _see_to_all(self, int count) noexcept:
        cdef int index
        if count >= WORTHWHILE and self._helpers:
            if post.helpers < self._helpers or post.process != getpid():
                hire(self._helpers)
                self._helpers = min(self._helpers, post.helpers)  # the system may give no more
            send_together(self._letters, count)
        else:
            for index in range(count):
                see_to(&self._letters[index])

    cdef int _make_room(self, int file) except -1:
        cdef int files = max(2 * self._files, file + 1, 1024)
        cdef void* room = realloc(self._is_gathered, files)
        if not room:
            raise MemoryError
        self._is_gathered = <char*>room
        memset(self._is_gathered + self._files, 0, files - self._files)
        self._files = files
        return 0


cdef inline double seconds_now() noexcept nogil:
    """As `time.monotonic`."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + 1e-9 * now.tv_nsec


cdef int wait_for_events(int epoll, epoll_event* events, int patience, bint* is_brisk) noexcept nogil:
    """As `epoll_wait`. If the last event came within microseconds, the next is looked for before going to sleep.

    To be put to sleep and woken takes longer than a request does. One look in vain, and the process sleeps.
    """
    cdef double begin = seconds_now()
    cdef int count = 0
    while is_brisk[0] and not count and seconds_now() - begin < BRISK_SECONDS:
        count = epoll_wait(epoll, events, AT_ONCE, 0)
    if not count:
        count = epoll_wait(epoll, events, AT_ONCE, patience)
    is_brisk[0] = seconds_now() - begin < BRISK_SECONDS
    return count


cdef class Readers:
    """As `loop.Readers`."""

    cdef object _loop, _turn
    cdef Sending _sending
    cdef list _callbacks  # by descriptor; None where nobody is to be called
    cdef int _epoll, _other, _untimed
    cdef bint _has_cores
    cdef public bint is_pressed

    def __cinit__(self):
        self._epoll = -1

    def __dealloc__(self):
        self.close()

    def __init__(self, loop, Sending sending not None, int other, bint has_cores):
        """`other`: the file that can be read when `wait` is to return. `has_cores`: clients need not wait for this
        process to sleep before they run."""
        cdef epoll_event event
        self._loop = loop
        self._turn = loop.turn
        self._sending = sending
        self._callbacks = []
        self._other = other
        self._has_cores = has_cores
        self._epoll = epoll_create1(EPOLL_CLOEXEC)
        event.events = EPOLLIN
        event.data.fd = other
        if self._epoll < 0 or epoll_ctl(self._epoll, EPOLL_CTL_ADD, other, &event) < 0:
            PyErr_SetFromErrno(OSError)

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

    def wait(self, double seconds):
        """Call back for what can be read, until so much time has passed, or the loop has something to do."""
        cdef epoll_event events[AT_ONCE]
        cdef int index, file, count = 0, total = 0, patience
        cdef double now = seconds_now(), end = now + seconds
        cdef bint is_over = False, is_brisk = False
        while True:  # this is the hottest loop of all, so it does what it can without Python
            # Where many can be read, more can be by now. But others want the interpreter, too.
            if count >= MANY and total < AT_ONCE:
                count = epoll_wait(self._epoll, events, AT_ONCE, 0)
            else:
                patience = max(<int>(1000 * (end - now) + 0.999), 0)
                total = 0
                is_brisk = is_brisk and self._has_cores
                with nogil:
                    count = wait_for_events(self._epoll, events, patience, &is_brisk)
            now = seconds_now()
            self._turn.now = now
            try:
                for index in range(count):
                    file = events[index].data.fd
                    if file == self._other:
                        is_over = self.is_pressed = True
                        continue
                    callback = self._callbacks[file]
                    if callback is not None:  # it may be gone by now, because of one before it
                        callback()
            finally:
                self._sending.flush()
            if count > 0:
                self._untimed -= 1
                if self._untimed < 0:
                    self._untimed = self._loop.time_turn()
                total += count
            if is_over or count < 0 or now >= end or self.is_pressed:
                return

    cpdef close(self):
        if self._epoll >= 0:
            close(self._epoll)
            self._epoll = -1
