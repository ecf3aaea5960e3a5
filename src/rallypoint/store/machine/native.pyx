# cython: language_level=3, binding=False, boundscheck=False, wraparound=False
"""Asking the Linux kernel whose the other ends of many connections are, without an object for each step.

`socket_owner` uses this where it has been compiled. Only plain answers are understood here: it asks again about
all others.
"""

from libc.errno cimport ENOENT
from libc.stdint cimport uint16_t, uint32_t, uint8_t
from libc.string cimport memcmp, memcpy, memset

cdef extern from "<netinet/in.h>" nogil:
    enum:
        IPPROTO_TCP
    struct sockaddr_in:
        uint16_t sin_port
        uint32_t sin_addr
    struct sockaddr_in6:
        uint16_t sin6_port
        uint8_t sin6_addr[16]
        uint32_t sin6_scope_id

cdef extern from "<sys/socket.h>" nogil:
    enum:
        AF_INET
        AF_INET6
    struct sockaddr:
        pass
    struct sockaddr_storage:
        uint16_t ss_family
    int getsockname(int file, sockaddr* address, unsigned int* size)
    int getpeername(int file, sockaddr* address, unsigned int* size)
    Py_ssize_t recv(int file, void* room, size_t size, int flags)
    Py_ssize_t send(int file, const void* data, size_t size, int flags)

cdef extern from "<linux/netlink.h>" nogil:
    enum:
        NLM_F_REQUEST
        NLMSG_ERROR
    struct nlmsghdr:
        uint32_t nlmsg_len
        uint16_t nlmsg_type
        uint16_t nlmsg_flags
        uint32_t nlmsg_seq
    struct nlmsgerr:
        int error

cdef extern from "<linux/sock_diag.h>" nogil:
    enum:
        SOCK_DIAG_BY_FAMILY

cdef extern from "<linux/inet_diag.h>" nogil:
    struct inet_diag_sockid:
        uint16_t idiag_sport
        uint16_t idiag_dport
        uint32_t idiag_src[4]
        uint32_t idiag_dst[4]
        uint32_t idiag_if
        uint32_t idiag_cookie[2]
    struct inet_diag_req_v2:
        uint8_t sdiag_family
        uint8_t sdiag_protocol
        uint32_t idiag_states
        inet_diag_sockid id
    struct inet_diag_msg:
        uint8_t idiag_state
        uint32_t idiag_uid
        uint32_t idiag_inode

cdef struct Question:
    nlmsghdr head
    inet_diag_req_v2 body

cdef union Body:
    inet_diag_msg row
    nlmsgerr failure

cdef struct Answer:
    nlmsghdr head
    Body body

cdef enum:
    MOST = 32  # so many answers fit into any netlink socket
    LISTENS = 10

cdef const unsigned char* MAPPED = b"\0\0\0\0\0\0\0\0\0\0\xff\xff"  # before an address of IPv4 in one of IPv6


def users_at_other_ends(int netlink, uint32_t number, list files not None):
    """The user at the other end of each connected socket; -1 if there is none, None if that is not plain.

    There may be up to 32 files. The questions get the numbers behind `number`. An answer with another number is of
    a question that was given up, and is passed over.
    """
    cdef Question questions[MOST]
    cdef Py_ssize_t asked_of[MOST]
    cdef Answer answer
    cdef Py_ssize_t count = len(files), asked = 0, answered = 0, index, size
    cdef list users = [None] * count
    if count > MOST:
        raise ValueError("too many at once")
    memset(questions, 0, sizeof(questions))
    for index in range(count):
        if put_question(&questions[asked], files[index], number + 1 + <uint32_t>asked):
            asked_of[asked] = index
            asked += 1
    size = asked * sizeof(Question)
    if send(netlink, questions, size, 0) != size:
        return users
    while answered < asked:
        size = recv(netlink, &answer, sizeof(answer), 0)
        if size < <Py_ssize_t>sizeof(nlmsghdr):
            break
        if answer.head.nlmsg_seq == <uint32_t>(number + 1 + <uint32_t>answered):
            users[asked_of[answered]] = user_in(&answer, size)
            answered += 1
    return users


cdef object user_in(Answer* answer, Py_ssize_t size):
    cdef size_t body = <size_t>size - sizeof(nlmsghdr)
    if answer.head.nlmsg_type == NLMSG_ERROR and body >= sizeof(nlmsgerr):
        return -1 if answer.body.failure.error == -ENOENT else None
    if answer.head.nlmsg_type != SOCK_DIAG_BY_FAMILY or body < sizeof(inet_diag_msg):
        return None
    if answer.body.row.idiag_state == LISTENS:
        return -1
    return answer.body.row.idiag_uid if answer.body.row.idiag_inode or answer.body.row.idiag_uid else None


cdef bint put_question(Question* question, int file, uint32_t number) noexcept:
    """Whose the other end of a socket is; False if its addresses are not known."""
    cdef sockaddr_storage here, there
    cdef unsigned int size = sizeof(here)
    cdef inet_diag_sockid* ends = &question.body.id
    if getsockname(file, <sockaddr*>&here, &size):
        return False
    size = sizeof(there)
    if getpeername(file, <sockaddr*>&there, &size) or here.ss_family != there.ss_family:
        return False
    question.head.nlmsg_len = sizeof(Question)
    question.head.nlmsg_type = SOCK_DIAG_BY_FAMILY
    question.head.nlmsg_flags = NLM_F_REQUEST
    question.head.nlmsg_seq = number
    question.body.sdiag_protocol = IPPROTO_TCP
    question.body.idiag_states = 0xFFFFFFFF
    ends.idiag_cookie[0] = ends.idiag_cookie[1] = 0xFFFFFFFF
    # What is there to us is here to the other end.
    if here.ss_family == AF_INET:
        question.body.sdiag_family = AF_INET
        ends.idiag_sport = (<sockaddr_in*>&there).sin_port
        ends.idiag_dport = (<sockaddr_in*>&here).sin_port
        memcpy(ends.idiag_src, &(<sockaddr_in*>&there).sin_addr, 4)
        memcpy(ends.idiag_dst, &(<sockaddr_in*>&here).sin_addr, 4)
        return True
    if here.ss_family != AF_INET6:
        return False
    ends.idiag_sport = (<sockaddr_in6*>&there).sin6_port
    ends.idiag_dport = (<sockaddr_in6*>&here).sin6_port
    cdef unsigned char* from_ = <unsigned char*>&(<sockaddr_in6*>&there).sin6_addr
    cdef unsigned char* to = <unsigned char*>&(<sockaddr_in6*>&here).sin6_addr
    if memcmp(from_, MAPPED, 12) == 0 and memcmp(to, MAPPED, 12) == 0:  # the other end is a socket of IPv4
        question.body.sdiag_family = AF_INET
        memcpy(ends.idiag_src, from_ + 12, 4)
        memcpy(ends.idiag_dst, to + 12, 4)
        return True
    question.body.sdiag_family = AF_INET6
    memcpy(ends.idiag_src, from_, 16)
    memcpy(ends.idiag_dst, to, 16)
    ends.idiag_if = (<sockaddr_in6*>&there).sin6_scope_id
    return True
