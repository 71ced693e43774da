// A libnccl played on the processor: ranks of one process, whose messages lie in this process's memory.
// PLAYED_NCCL says what it does: "version=23003", "wrong" (sums), "refuse" or "hang" (when ranks meet).
// What is called is written to the file PLAYED_LOG, a line a call.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 8 };
static struct { const float *from; float *to; size_t count; void *rank, *stream; } queue[MOST];
static int queued, in_group, communicators[MOST];

static int asked(const char *word) { return strstr(getenv("PLAYED_NCCL"), word) != NULL; }

#define NOTE(...)                               \
  do {                                          \
    FILE *log = fopen(getenv("PLAYED_LOG"), "a"); \
    fprintf(log, __VA_ARGS__);                  \
    fclose(log);                                \
  } while (0)

int ncclGetVersion(int *version) {
  *version = atoi(strstr(getenv("PLAYED_NCCL"), "version=") + strlen("version="));
  return 0;
}
const char *ncclGetErrorString(int status) { return status == 5 ? "invalid usage" : "other"; }
const char *ncclGetLastError(void *communicator) {
  return communicator ? "whose?" : "Duplicate GPU detected";
}

int ncclCommInitAll(void **found, int ranks, const int *devices) {
  const char *enabled = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  NOTE("meet %d on %d %d enabled %s ctas %s threads %s pid %d\n", ranks, devices[0], devices[1],
       enabled ? enabled : "no", getenv("NCCL_MAX_CTAS"), getenv("NCCL_NTHREADS"), getpid());
  while (asked("hang")) pause();
  if (asked("refuse")) return 5;
  for (int i = 0; i < ranks; ++i) found[i] = &communicators[i];
  return 0;
}

int ncclGroupStart(void) {
  queued = 0;
  in_group = 1;
  return 0;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *rank, void *stream) {
  if (!in_group || queued == MOST || type != 7 || operation != 0) return 4;
  queue[queued].from = from;
  queue[queued].to = to;
  queue[queued].count = count;
  queue[queued].rank = rank;
  queue[queued++].stream = stream;
  return 0;
}

// Of the ranks that summed last: the stream and bytes of each; 0 if there are no more.
size_t played_summed(int number, void **stream) {
  if (number >= queued) return 0;
  *stream = queue[number].stream;
  return 4 * queue[number].count;
}

int ncclGroupEnd(void) {
  in_group = 0;
  if (queued != 2 || queue[0].rank != &communicators[0] || queue[1].rank != &communicators[1]) return 4;
  NOTE("sum %zu %zu\n", queue[0].count, queue[1].count);
  const int off = asked("wrong");
  for (size_t i = 0; i < queue[0].count; ++i) {
    const float sum = queue[0].from[i] + queue[1].from[i] + off;
    queue[0].to[i] = queue[1].to[i] = sum;
  }
  return 0;
}
