/* The few calls of libnccl that a broadcast by nccl4py makes, with host memory for device memory. Rank 0 is the root.
 * Ranks share a file in FAKE_NCCL_DIR, so they may be threads or processes.
 *
 * Communicators do not block. Init and broadcast return ncclInProgress; the state stays so for three polls, and until
 * all ranks have come. Any call before it is ncclSuccess is refused, as NCCL refuses it. Broadcasts end later, in
 * their order, each when the other ranks have taken the bytes of the one before. Events of a test ask for that.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { POLLS = 3, MAX_RANKS = 8, MAX_OPS = 64, MAX_BYTES = 1 << 20, UINT8 = 1, ID_BYTES = 128 };

struct board { /* the content of the file */
    _Atomic int joined, is_aborted;
    _Atomic long sent, taken[MAX_RANKS];
    size_t size;
    char bytes[MAX_BYTES];
};

struct comm {
    struct board *board;
    struct comm *next;
    void *stream;
    int rank, size, polls, error;
    long begun, done;
    struct op {
        char *memory;
        size_t size;
    } ops[MAX_OPS];
};

static struct comm *_Atomic comms; /* of this process; one thread uses each */
/* A test sets these: in this rank the state becomes an error with this broadcast, counted from 1. */
int fake_failing_rank = -1;
long fake_failing_broadcast;

/* Carry out the broadcasts that can be: the work of the rank's stream. */
static void advance(struct comm *c) {
    struct board *b = c->board;
    for (; !c->error && c->done < c->begun; c->done++) {
        struct op *op = &c->ops[c->done % MAX_OPS];
        if (c->rank == 0) {
            for (int rank = 1; rank < c->size; rank++)
                if (b->taken[rank] < b->sent) return;
            memcpy(b->bytes, op->memory, b->size = op->size);
            b->sent++;
        } else {
            if (b->sent == b->taken[c->rank]) return;
            if (op->size != b->size) abort(); /* NCCL would hang, or write beyond the memory */
            memcpy(op->memory, b->bytes, op->size);
            b->taken[c->rank]++;
        }
    }
}

static int state(struct comm *c) {
    if (c->error) return c->error;
    struct board *b = c->board;
    int is_alone = b->joined < c->size, is_left = c->done < c->begun && (c->rank == 0 || b->sent == b->taken[c->rank]);
    if (b->is_aborted && (is_alone || is_left)) return REMOTE_ERROR;
    if (c->polls > 0 || is_alone) return IN_PROGRESS;
    return SUCCESS;
}

static int ready(struct comm *c) { return state(c) == IN_PROGRESS ? INVALID_ARGUMENT : state(c); }

int ncclGetVersion(int *version) {
    *version = 22809;
    return SUCCESS;
}

const char *ncclGetErrorString(int result) { return result == REMOTE_ERROR ? "remote error" : "other error"; }

const char *ncclGetLastError(void *comm) { return "the fake's last error"; }

int ncclGetUniqueId(char *id) {
    memset(id, 0, ID_BYTES);
    snprintf(id, ID_BYTES, "%s/XXXXXX", getenv("FAKE_NCCL_DIR"));
    int file = mkstemp(id);
    int is_made = file >= 0 && ftruncate(file, sizeof(struct board)) == 0;
    close(file);
    return is_made ? SUCCESS : SYSTEM_ERROR;
}

int ncclCommInitRankScalable(struct comm **out, int size, int rank, int num_ids, char *ids, unsigned *config) {
    /* ncclConfig_t begins with its size (size_t), a magic number, the version of nccl4py's header, and blocking. */
    int is_right = config && config[2] == 0xcafebeef && config[4] == 0 && num_ids == 1 && size <= MAX_RANKS;
    if (!is_right) return INVALID_ARGUMENT;
    int file = open(ids, O_RDWR);
    struct board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (board == MAP_FAILED) return SYSTEM_ERROR;
    struct comm *c = *out = calloc(1, sizeof *c);
    *c = (struct comm){.board = board, .rank = rank, .size = size, .polls = POLLS};
    c->next = comms;
    while (!atomic_compare_exchange_weak(&comms, &c->next, c)) continue;
    board->joined++;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(struct comm *c, int *result) {
    if (c->polls > 0) c->polls--;
    *result = state(c);
    return SUCCESS;
}

int ncclCommUserRank(struct comm *c, int *rank) {
    *rank = c->rank;
    return ready(c);
}

int ncclBroadcast(char *from, char *to, size_t count, int type, int root, struct comm *c, void *stream) {
    int is_right = type == UINT8 && root == 0 && (c->rank > 0 || from == to) && count <= MAX_BYTES && stream;
    int result = is_right ? ready(c) : INVALID_ARGUMENT;
    if (result == SUCCESS && c->begun - c->done < MAX_OPS) {
        c->ops[c->begun++ % MAX_OPS] = (struct op){to, count};
        c->stream = stream;
        c->polls = POLLS;
        if (c->rank == fake_failing_rank && c->begun == fake_failing_broadcast) c->error = SYSTEM_ERROR;
        result = IN_PROGRESS;
    }
    return result;
}

int ncclCommAbort(struct comm *c) {
    c->board->is_aborted = 1;
    c->stream = NULL;
    return SUCCESS;
}

/* For a test's events: the broadcasts that were begun, or have ended, on a stream. */
long fake_count(void *stream, int is_done) {
    long count = 0;
    for (struct comm *c = comms; c; c = c->next) {
        if (c->stream != stream) continue;
        advance(c);
        count = is_done ? c->done : c->begun;
    }
    return count;
}
