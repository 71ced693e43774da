typedef unsigned long long u64;

// The record, in 64-bit words: whether to stop, how many blocks have begun; when the gate opened and
// closed, and how many chunks had been sent by then; then for each block its begin, end, and chunks sent.
enum { STOP, BEGUN, OPENED, SENT_BEFORE, CLOSED, SENT_AFTER, HEAD };

static __device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// c = a + b, chunk by chunk: block i takes the chunks i, i + blocks, ... of the buffers, round and round.
// It waits for nothing but the time at which its next chunk is due, and ends on the flag, when the chunk
// after most_chunks would be due, and after most_ns in any case. Buffers hold buffer_chunks >= blocks chunks.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
standin(const float4* __restrict__ a, const float4* __restrict__ b, float4* __restrict__ c,
        u64 buffer_chunks, u64 most_chunks, double chunk_ns, u64 most_ns, volatile u64* record) {
  volatile u64* begins = record + HEAD;
  volatile u64* ends = begins + gridDim.x;
  volatile u64* sent = ends + gridDim.x;
  const u64 begin = now_ns();
  if (threadIdx.x == 0) {
    begins[blockIdx.x] = begin;
    atomicAdd((u64*)record + BEGUN, 1ULL);
  }
  u64 chunk = blockIdx.x;
  for (u64 done = 0;; ++done) {
    bool halt = false;
    if (threadIdx.x == 0) {
      sent[blockIdx.x] = done;
      const double due_ns = done * chunk_ns;
      u64 passed;
      do {
        passed = now_ns() - begin;
        halt = record[STOP] || passed >= most_ns;
      } while (!halt && passed < due_ns);
      halt |= done >= most_chunks;
    }
    if (__syncthreads_or(halt)) break;
    const u64 first = chunk * UNROLL * blockDim.x + threadIdx.x;
    float4 x[UNROLL], y[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) x[i] = a[first + i * blockDim.x];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) y[i] = b[first + i * blockDim.x];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
      c[first + i * blockDim.x] =
          make_float4(x[i].x + y[i].x, x[i].y + y[i].y, x[i].z + y[i].z, x[i].w + y[i].w);
    chunk += gridDim.x;
    if (chunk >= buffer_chunks) chunk -= buffer_chunks;
  }
  if (threadIdx.x == 0) ends[blockIdx.x] = now_ns();
}

// One thread, before and after the computation and in its stream: waits at least hold_ns, and until
// `blocks` blocks have begun or most_ns are over; notes the time and what has been sent; may set the flag.
extern "C" __global__ void gate(volatile u64* record, u64 slot, u64 blocks, u64 hold_ns, u64 most_ns,
                                u64 stop) {
  const u64 begin = now_ns();
  u64 passed;
  do {
    passed = now_ns() - begin;
  } while (passed < hold_ns || (record[BEGUN] < blocks && passed < most_ns));
  volatile u64* sent = record + HEAD + 2 * blocks;
  u64 chunks = 0;
  for (u64 i = 0; i < blocks; ++i) chunks += sent[i];
  record[slot] = now_ns();
  record[slot + 1] = chunks;
  if (stop) record[STOP] = 1;
}
