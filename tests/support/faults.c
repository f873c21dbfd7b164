/* Counts a process's operations on files below a folder, and lets one of them go wrong.

   Loaded before the C library (LD_PRELOAD), it sees the operations of Python, of torch's C++ and of safetensors' Rust
   alike. Until faults_arm is called it does nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* What goes wrong; tests/support/faults.py has the same list. */
enum { NOTHING, KILL_BEFORE, KILL_AFTER, END, HALF, FULL, DENIED, DEVICE, READ_ONLY, PAUSE };

static char root[PATH_MAX];
static size_t root_length;
static long target;
static int action = NOTHING, log_file = -1;
static volatile long count;

void faults_arm(const char *folder, long number, int what, int log) {
    count = 0;
    target = number;
    action = what;
    log_file = log;
    root_length = strlen(folder);
    memcpy(root, folder, root_length + 1);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int is_below(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The path of an open file or folder, "" if it has none. */
static const char *path_of(int file, char *found) {
    char link[40];
    found[0] = 0;
    if (!root_length) return found;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, found, PATH_MAX - 1);
    found[length < 0 ? 0 : length] = 0;
    return found;
}

/* The absolute path of a path that may be relative to a folder. */
static const char *whole(int folder, const char *path, char *found) {
    char start[PATH_MAX];
    if (!path || path[0] == '/') return path ? path : "";
    if (folder == AT_FDCWD) {
        if (syscall(SYS_getcwd, start, sizeof start) < 0) return "";
    } else
        path_of(folder, start);
    snprintf(found, 2 * PATH_MAX, "%s/%s", start, path);
    return found;
}

/* Kinds of operations: r opens to read, g reads, c creates, w writes, m makes a folder, n renames, u unlinks,
   t truncates, s syncs. Returns the error that the operation has to fail with, or 0. */
static int before(char kind, const char *path, int *turn) {
    *turn = 0;
    if (!is_below(path)) return 0;
    long number = __sync_add_and_fetch(&count, 1);
    if (log_file >= 0) {
        char line[PATH_MAX + 40];
        int length = snprintf(line, sizeof line, "%ld %c %s\n", number, kind, path + root_length);
        syscall(SYS_write, log_file, line, length);
    }
    if (action == FULL && number >= target) return strchr("cwmt", kind) ? ENOSPC : 0;
    if (action == READ_ONLY && number >= target) return strchr("cwmnut", kind) ? EROFS : 0;
    if (number != target) return 0;
    *turn = 1;
    if (action == KILL_BEFORE) kill(getpid(), SIGKILL);
    if (action == PAUSE) kill(getpid(), SIGSTOP);
    return action == DENIED ? EACCES : action == DEVICE ? EIO : 0;
}

static void after(int turn) {
    if (!turn) return;
    if (action == KILL_AFTER || action == HALF) kill(getpid(), SIGKILL);
    if (action == END) kill(getpid(), SIGTERM);
}

#define DO(kind, path, call) \
    int turn, wrong = before(kind, path, &turn); \
    if (wrong) { errno = wrong; return -1; } \
    __typeof__(call) result = call; \
    after(turn); \
    return result

static char opens(int flags) { return flags & (O_CREAT | O_TRUNC) || (flags & O_ACCMODE) != O_RDONLY ? 'c' : 'r'; }

#define MODE(flags) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        MODE(flags) REAL(name); char at[2 * PATH_MAX]; \
        if (flags & O_DIRECTORY) return real(path, flags, mode); \
        DO(opens(flags), whole(AT_FDCWD, path, at), real(path, flags, mode)); \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        MODE(flags) REAL(name); char at[2 * PATH_MAX]; \
        if (flags & O_DIRECTORY) return real(folder, path, flags, mode); \
        DO(opens(flags), whole(folder, path, at), real(folder, path, flags, mode)); \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
    FILE *name(const char *path, const char *how) { \
        REAL(name); char at[2 * PATH_MAX]; \
        int turn, wrong = before(how[0] == 'r' && !strchr(how, '+') ? 'r' : 'c', whole(AT_FDCWD, path, at), &turn); \
        if (wrong) { errno = wrong; return NULL; } \
        FILE *result = real(path, how); \
        after(turn); \
        return result; \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t read(int file, void *to, size_t size) {
    REAL(read); char at[PATH_MAX];
    DO('g', path_of(file, at), real(file, to, size));
}
#define PREAD(name, place) \
    ssize_t name(int file, void *to, size_t size, place offset) { \
        REAL(name); char at[PATH_MAX]; \
        DO('g', path_of(file, at), real(file, to, size, offset)); \
    }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

/* A write that is killed half-way has written half. */
#define HALVED(size) (turn && action == HALF ? (size) / 2 : (size))
ssize_t write(int file, const void *from, size_t size) {
    REAL(write); char at[PATH_MAX];
    DO('w', path_of(file, at), real(file, from, HALVED(size)));
}
#define PWRITE(name, place) \
    ssize_t name(int file, const void *from, size_t size, place offset) { \
        REAL(name); char at[PATH_MAX]; \
        DO('w', path_of(file, at), real(file, from, HALVED(size), offset)); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)
ssize_t writev(int file, const struct iovec *parts, int number) {
    REAL(writev); char at[PATH_MAX];
    DO('w', path_of(file, at), real(file, parts, HALVED(number)));
}
ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
    REAL(sendfile); char at[PATH_MAX];
    DO('w', path_of(to, at), real(to, from, offset, HALVED(size)));
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) {
    REAL(sendfile64); char at[PATH_MAX];
    DO('w', path_of(to, at), real(to, from, offset, HALVED(size)));
}
ssize_t copy_file_range(int from, off64_t *first, int to, off64_t *second, size_t size, unsigned flags) {
    REAL(copy_file_range); char at[PATH_MAX];
    DO('w', path_of(to, at), real(from, first, to, second, HALVED(size), flags));
}

int ftruncate(int file, off_t size) {
    REAL(ftruncate); char at[PATH_MAX];
    DO('t', path_of(file, at), real(file, size));
}
int ftruncate64(int file, off64_t size) {
    REAL(ftruncate64); char at[PATH_MAX];
    DO('t', path_of(file, at), real(file, size));
}
int fallocate(int file, int mode, off_t offset, off_t size) {
    REAL(fallocate); char at[PATH_MAX];
    DO('t', path_of(file, at), real(file, mode, offset, size));
}
int fsync(int file) {
    REAL(fsync); char at[PATH_MAX];
    DO('s', path_of(file, at), real(file));
}

int rename(const char *from, const char *to) {
    REAL(rename); char at[2 * PATH_MAX];
    DO('n', whole(AT_FDCWD, to, at), real(from, to));
}
int renameat(int folder, const char *from, int other, const char *to) {
    REAL(renameat); char at[2 * PATH_MAX];
    DO('n', whole(other, to, at), real(folder, from, other, to));
}
int unlink(const char *path) {
    REAL(unlink); char at[2 * PATH_MAX];
    DO('u', whole(AT_FDCWD, path, at), real(path));
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat); char at[2 * PATH_MAX];
    DO('u', whole(folder, path, at), real(folder, path, flags));
}
int rmdir(const char *path) {
    REAL(rmdir); char at[2 * PATH_MAX];
    DO('u', whole(AT_FDCWD, path, at), real(path));
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir); char at[2 * PATH_MAX];
    DO('m', whole(AT_FDCWD, path, at), real(path, mode));
}
int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat); char at[2 * PATH_MAX];
    DO('m', whole(folder, path, at), real(folder, path, mode));
}
