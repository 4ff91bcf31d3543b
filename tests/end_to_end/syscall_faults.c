/* Makes system calls of a run's processes fail on purpose; loaded with LD_PRELOAD by tests/end_to_end/syscalls.py.
 *
 * Only calls that concern files below SYSCALLS_RUN, and accept, are looked at. Each one is a line in SYSCALLS_DIR/seen,
 * once for each process: "ROLE FUNCTION PATH"; in the path, a word with a digit and a random name are "#". The file SYSCALLS_DIR/armed holds
 * "ROLE FUNCTION PATH ERRNO SKIP": the call after SKIP matching ones fails with ERRNO, once, and the file becomes
 * SYSCALLS_DIR/hit. If ERRNO is ENOSPC, the hit also makes SYSCALLS_DIR/full, and as long as that exists, every call
 * that needs room fails in every process, as on a full disk.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_SEEN 4096
static char run[PATH_MAX], seen_path[PATH_MAX], armed_path[PATH_MAX], hit_path[PATH_MAX], full_path[PATH_MAX];
static char role[32] = "other";
static char *seen[MAX_SEEN];
static int num_seen, num_skipped, is_on;
static char skipped_for[2 * PATH_MAX];
static volatile int lock;

static const char *const ROLES[] = {"launch", "learner", "queue", "generator"};

/* Raw calls, so that this library never counts its own. */
static int raw_open(const char *path, int flags) { return syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0644); }

__attribute__((constructor)) static void begin(void) {
    const char *directory = getenv("SYSCALLS_DIR"), *below = getenv("SYSCALLS_RUN");
    char line[8192];
    int fd = raw_open("/proc/self/cmdline", O_RDONLY);
    ssize_t size = fd < 0 ? 0 : syscall(SYS_read, fd, line, sizeof line - 1);
    if (fd >= 0) syscall(SYS_close, fd);
    if (!directory || !below || size <= 0) return;
    int is_ours = 0;
    for (char *word = line; word < line + size; word += strlen(word) + 1) {
        line[size] = 0;
        if (strstr(word, "async_rl")) is_ours = 1;
        for (int i = 0; is_ours && i < 4; i++)
            if (!strcmp(word, ROLES[i]) && !strcmp(role, "other")) strcpy(role, ROLES[i]);
    }
    snprintf(run, sizeof run, "%s", below);
    snprintf(seen_path, sizeof seen_path, "%s/seen", directory);
    snprintf(armed_path, sizeof armed_path, "%s/armed", directory);
    snprintf(hit_path, sizeof hit_path, "%s/hit", directory);
    snprintf(full_path, sizeof full_path, "%s/full", directory);
    is_on = strcmp(role, "other") != 0;
}

static void note(const char *place) {
    for (int i = 0; i < num_seen; i++)
        if (!strcmp(seen[i], place)) return;
    if (num_seen < MAX_SEEN) seen[num_seen++] = strdup(place);
    int fd = raw_open(seen_path, O_WRONLY | O_CREAT | O_APPEND);
    if (fd < 0) return;
    syscall(SYS_write, fd, place, strlen(place));
    syscall(SYS_close, fd);
}

static int in_word(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

/* Write ``path`` to ``to``, with "#" for words that have a digit and for the random names of temporary files. */
static int shorten(const char *path, char *to) {
    char *begin = to;
    while (*path && to - begin < PATH_MAX) {
        int length = 0, is_random = !strncmp(path, "tmp", 3);
        for (; in_word(path[length]); length++) is_random |= path[length] >= '0' && path[length] <= '9';
        if (!strncmp(path, "probe-", 6)) {
            is_random = 1;
            length = strcspn(path, "/");
        }
        if (!length) {
            *to++ = *path == ' ' ? '_' : *path;
            path++;
        } else if (is_random) {
            *to++ = '#';
        } else {
            memcpy(to, path, length);
            to += length;
        }
        path += length;
    }
    *to = 0;
    return to - begin;
}

/* Whether the armed failure is for this place; if so, claim it. Returns its error number, or 0. */
static int claim(const char *place) {
    char line[2 * PATH_MAX];
    int fd = raw_open(armed_path, O_RDONLY);
    if (fd < 0) return 0;
    ssize_t size = syscall(SYS_read, fd, line, sizeof line - 1);
    syscall(SYS_close, fd);
    if (size <= 0) return 0;
    line[size] = 0;
    size_t length = strlen(place) - 1;
    if (strncmp(line, place, length) || line[length] != ' ') return 0;
    int error = 0, skip = 0;
    if (sscanf(line + length, "%d %d", &error, &skip) != 2) return 0;
    if (strcmp(skipped_for, line)) {
        snprintf(skipped_for, sizeof skipped_for, "%s", line);
        num_skipped = 0;
    }
    if (num_skipped++ < skip) return 0;
    if (syscall(SYS_renameat2, AT_FDCWD, armed_path, AT_FDCWD, hit_path, 0)) return 0;
    if (error == ENOSPC && (fd = raw_open(full_path, O_WRONLY | O_CREAT)) >= 0) syscall(SYS_close, fd);
    return error;
}

/* Returns 0, or sets errno and returns -1. */
static int check(const char *function, const char *path, int needs_room) {
    if (!is_on) return 0;
    int before = errno, error = 0;
    size_t length = strlen(run);
    if (path && (strncmp(path, run, length) || (path[length] && path[length] != '/'))) return 0;
    char place[2 * PATH_MAX];
    int end = snprintf(place, sizeof place, "%s %s ", role, function);
    end += path ? shorten(path[length] ? path + length : "/", place + end) : sprintf(place + end, "-");
    strcpy(place + end, "\n");
    while (__sync_lock_test_and_set(&lock, 1));
    note(place);
    error = claim(place);
    __sync_lock_release(&lock);
    if (!error && needs_room && !syscall(SYS_faccessat, AT_FDCWD, full_path, F_OK)) error = ENOSPC;
    errno = error ? error : before;
    return error ? -1 : 0;
}

static const char *path_of(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, PATH_MAX - 1);
    if (size <= 0) return "";
    buffer[size] = 0;
    char *deleted = strstr(buffer, " (deleted)");
    if (deleted) *deleted = 0;
    return buffer;
}

static const char *absolute(int directory, const char *path, char *buffer) {
    if (!path || path[0] == '/') return path ? path : "";
    if (directory == AT_FDCWD) {
        if (syscall(SYS_getcwd, buffer, PATH_MAX) < 0) return "";
    } else if (!*path_of(directory, buffer)) {
        return "";
    }
    size_t length = strlen(buffer);
    snprintf(buffer + length, PATH_MAX - length, "/%s", path);
    return buffer;
}

#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define FD_CALL(name, needs_room, result, parameters, arguments)                         \
    result name parameters {                                                            \
        char buffer[PATH_MAX];                                                          \
        REAL(name);                                                                     \
        if (is_on && check(#name, path_of(fd, buffer), needs_room)) return -1;          \
        return real arguments;                                                          \
    }

FD_CALL(write, 1, ssize_t, (int fd, const void *data, size_t size), (fd, data, size))
FD_CALL(pwrite, 1, ssize_t, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
FD_CALL(pwrite64, 1, ssize_t, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
FD_CALL(writev, 1, ssize_t, (int fd, const struct iovec *parts, int count), (fd, parts, count))
FD_CALL(pwritev, 1, ssize_t, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
FD_CALL(pwritev64, 1, ssize_t, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
FD_CALL(pwritev2, 1, ssize_t, (int fd, const struct iovec *parts, int count, off_t at, int flags),
        (fd, parts, count, at, flags))
FD_CALL(pwritev64v2, 1, ssize_t, (int fd, const struct iovec *parts, int count, off64_t at, int flags),
        (fd, parts, count, at, flags))
FD_CALL(sendfile, 1, ssize_t, (int fd, int from, off_t *at, size_t size), (fd, from, at, size))
FD_CALL(sendfile64, 1, ssize_t, (int fd, int from, off64_t *at, size_t size), (fd, from, at, size))
FD_CALL(fsync, 0, int, (int fd), (fd))
FD_CALL(fdatasync, 0, int, (int fd), (fd))
FD_CALL(ftruncate, 0, int, (int fd, off_t size), (fd, size))
FD_CALL(ftruncate64, 0, int, (int fd, off64_t size), (fd, size))

/* posix_fallocate returns its error. */
int posix_fallocate64(int fd, off64_t at, off64_t size) {
    char buffer[PATH_MAX];
    REAL(posix_fallocate64);
    int before = errno;
    if (is_on && check("posix_fallocate64", path_of(fd, buffer), 1)) {
        int error = errno;
        errno = before;
        return error;
    }
    return real(fd, at, size);
}

#define OPEN_CALL(name, parameters, directory, arguments)                                                     \
    int name parameters {                                                                                     \
        char buffer[PATH_MAX];                                                                                \
        va_list more;                                                                                         \
        va_start(more, flags);                                                                                \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0;                             \
        va_end(more);                                                                                         \
        REAL(name);                                                                                           \
        int creates = (flags & O_CREAT) != 0;                                                                 \
        if (is_on && check(creates ? "open-new" : "open", absolute(directory, path, buffer), creates)) return -1; \
        return real arguments;                                                                                \
    }
OPEN_CALL(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN_CALL(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN_CALL(openat, (int from, const char *path, int flags, ...), from, (from, path, flags, mode))
OPEN_CALL(openat64, (int from, const char *path, int flags, ...), from, (from, path, flags, mode))

#define FOPEN_CALL(name)                                                                                   \
    FILE *name(const char *path, const char *how) {                                                        \
        char buffer[PATH_MAX];                                                                             \
        REAL(name);                                                                                        \
        int creates = how[0] != 'r';                                                                       \
        if (is_on && check(creates ? "open-new" : "open", absolute(AT_FDCWD, path, buffer), creates)) return NULL; \
        return real(path, how);                                                                            \
    }
FOPEN_CALL(fopen)
FOPEN_CALL(fopen64)

int mkdir(const char *path, mode_t mode) {
    char buffer[PATH_MAX];
    REAL(mkdir);
    if (is_on && check("mkdir", absolute(AT_FDCWD, path, buffer), 1)) return -1;
    return real(path, mode);
}

int rename(const char *from, const char *to) {
    char buffer[PATH_MAX];
    REAL(rename);
    if (is_on && check("rename", absolute(AT_FDCWD, to, buffer), 1)) return -1;
    return real(from, to);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    char buffer[PATH_MAX];
    REAL(renameat);
    if (is_on && check("rename", absolute(to_directory, to, buffer), 1)) return -1;
    return real(from_directory, from, to_directory, to);
}

int accept(int fd, struct sockaddr *address, socklen_t *length) {
    REAL(accept);
    if (check("accept", NULL, 0)) return -1;
    return real(fd, address, length);
}

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags) {
    REAL(accept4);
    if (check("accept", NULL, 0)) return -1;
    return real(fd, address, length, flags);
}
