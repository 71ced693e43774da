// What ddlkit calls of the CUDA driver (libcuda.so.1) and of NVRTC, played on the processor.
//
// Kernels are ddlkit's own source, compiled for the processor: kernels.inc, made by played_driver.py. They
// get what the real driver would hand on: a CUlaunchConfig and kernelParams, whose layouts are written down
// here a second time. A block is PLAYED_THREADS operating-system threads at most; so a kernel that counts
// its threads moves less than on a GPU. The GPU's timer runs slower than the clock: a thread that must have
// started soon may have to wait for a core. A stream is a chain of tasks, the null stream the caller itself:
// torch's operations, played on the processor, are over when they return.
//
// Misuse is refused with the real driver's status, and said on standard error.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// -- CUDA C++ as the processor understands it -----------------------------------------------------

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

struct float4 {
  float x, y, z, w;
};
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Dim {
  unsigned x, y, z;
};
static thread_local Dim threadIdx, blockIdx, gridDim, blockDim;

struct Block {
  explicit Block(int threads) : met(threads), read(threads) {}
  std::barrier<> met, read;
  std::atomic<int> any{0};
};
static thread_local Block* block_here;

static inline int __syncthreads_or(int value) {
  if (value) block_here->any = 1;
  block_here->met.arrive_and_wait();
  const int found = block_here->any;
  block_here->read.arrive_and_wait();
  return found;  // kernels leave on it: it is never taken back
}
static inline void __syncthreads() { block_here->met.arrive_and_wait(); }
static inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
static double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static inline unsigned long long globaltimer() {
  usleep(20);  // whoever polls the timer leaves the core to others
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (t.tv_sec * 1000000000ULL + t.tv_nsec) / PLAYED_SLOWNESS;
}

#include "kernels.inc"

// -- kernels as the driver sees them --------------------------------------------------------------

static int refuse(int status, const char* why) {
  fprintf(stderr, "played driver: %s\n", why);
  return status;
}

enum { OK = 0, INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_HANDLE = 400, NOT_FOUND = 500 };
enum { OUT_OF_RESOURCES = 701 };

// The argument at a place, if it can be one of that type: an address must be aligned, and a double is not
// a small whole number's bits.
template <class T>
static bool possible(void* place) {
  if constexpr (std::is_pointer_v<T>) {
    const auto address = *static_cast<std::uintptr_t*>(place);
    return address && address % alignof(std::remove_pointer_t<T>) == 0;
  } else if constexpr (std::is_same_v<T, double>) {
    const double value = *static_cast<double*>(place);
    return value == 0 || std::isnormal(value);
  }
  return true;
}

struct Function {
  std::function<std::function<void()>(void**)> bind;  // nothing for arguments that cannot be
  unsigned most_shared = 48 << 10;
};

template <class... A, std::size_t... I>
static std::function<void()> bound(void (*kernel)(A...), void** p, std::index_sequence<I...>) {
  if (!(possible<std::remove_cv_t<A>>(p[I]) && ...)) return {};
  std::tuple<A...> values{*static_cast<std::remove_cv_t<A>*>(p[I])...};
  return [=] { std::apply(kernel, values); };
}
template <class... A>
static Function function(void (*kernel)(A...)) {
  return {[=](void** p) { return bound(kernel, p, std::index_sequence_for<A...>{}); }};
}

static std::map<std::string, Function> functions{KERNELS};

static void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  std::vector<std::thread> running;
  std::vector<Block*> shared;
  for (unsigned b = 0; b < blocks; ++b) {
    shared.push_back(new Block(threads));
    for (unsigned t = 0; t < threads; ++t)
      running.emplace_back([=, block = shared.back()] {
        threadIdx = {t, 0, 0}, blockIdx = {b, 0, 0};
        gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1}, block_here = block;
        kernel();
      });
  }
  for (auto& thread : running) thread.join();
  for (auto* block : shared) delete block;
}

// -- streams ---------------------------------------------------------------------------------------

struct Stream {
  std::shared_future<void> last;
};
static std::mutex lock;
static std::vector<Stream*> streams;
static std::vector<std::shared_future<void>> null_waits;

static bool known(void* stream) {
  std::lock_guard guard(lock);
  for (auto* one : streams)
    if (one == stream) return true;
  return stream == nullptr;
}
static std::shared_future<void> last_of(Stream* stream) {
  std::lock_guard guard(lock);
  return stream->last;
}
static void settle() {  // what the null stream was told to wait for
  std::vector<std::shared_future<void>> before;
  {
    std::lock_guard guard(lock);
    before.swap(null_waits);
  }
  for (auto& one : before) one.wait();
}
static void submit(Stream* stream, std::function<void()> work) {
  if (!stream) {
    settle();
    return work();
  }
  std::lock_guard guard(lock);
  stream->last = std::async(std::launch::async, [work, before = stream->last] {
                   if (before.valid()) before.wait();
                   work();
                 }).share();
}

extern "C" {

void* played_stream_create() {
  std::lock_guard guard(lock);
  streams.push_back(new Stream);
  return streams.back();
}
void played_stream_synchronize(Stream* stream) {
  if (!stream) return settle();
  if (auto last = last_of(stream); last.valid()) last.wait();
}
void played_synchronize() {
  std::vector<Stream*> all;
  {
    std::lock_guard guard(lock);
    all = streams;
  }
  settle();
  for (auto* stream : all) played_stream_synchronize(stream);
}
// What comes next in `stream` waits for what `other` has been given so far; the null stream's caller when it
// next asks for something there.
void played_stream_wait(Stream* stream, Stream* other) {
  if (!other) return;
  auto last = last_of(other);
  if (!last.valid()) return;
  if (stream) return submit(stream, [last] { last.wait(); });
  std::lock_guard guard(lock);
  null_waits.push_back(last);
}
void played_record(Stream* stream, double* at_s) {
  submit(stream, [at_s] { *at_s = now_s(); });
}
// A copy engine: it takes its time, and no core. Of a place to itself, it is only the time.
void played_copy(Stream* stream, void* to, const void* from, std::size_t bytes) {
  submit(stream, [=] {
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::duration<double>(double(bytes) / PLAYED_COPY_BYTES_PER_S);
    if (to != from) std::memcpy(to, from, bytes);
    std::this_thread::sleep_until(end);
  });
}

// -- the driver ------------------------------------------------------------------------------------

struct Attribute {  // CUlaunchAttribute: its value begins at 8 bytes and has 64
  int id;
  alignas(8) unsigned value[16];
};
struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  Stream* stream;
  Attribute* attributes;
  unsigned n_attributes;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56);

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
int cuDeviceGetCount(int* count) {
  *count = std::stoi(std::getenv("PLAYED_GPUS"));
  return OK;
}
int cuDeviceGetName(char* name, int size, int) {
  std::snprintf(name, size, "Played GPU");
  return OK;
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = 8ULL << 30;
  return OK;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  if (attribute != 75 && attribute != 76)
    return refuse(INVALID_VALUE, "only compute capability (75, 76) is played");
  *value = attribute == 75 ? 9 : 0;
  return OK;
}

static int module_token;

int cuModuleLoadData(void** module, const void* image) {
  if (std::memcmp(image, "\x7f" "ELF", 4)) return refuse(INVALID_IMAGE, "an image is no cubin");
  *module = &module_token;
  return OK;
}
int cuModuleGetFunction(Function** found, void* module, const char* name) {
  if (module != &module_token) return refuse(INVALID_HANDLE, "no such module");
  const auto at = functions.find(name);
  if (at == functions.end()) return refuse(NOT_FOUND, name);
  *found = &at->second;
  return OK;
}
static bool is_function(Function* asked) {
  for (auto& [_, one] : functions)
    if (&one == asked) return true;
  return false;
}
int cuFuncGetAttribute(int* value, int attribute, Function* function) {
  if (!is_function(function)) return refuse(INVALID_HANDLE, "no such function");
  if (attribute != 4) return refuse(INVALID_VALUE, "only registers (4) are played");
  *value = 94;
  return OK;
}
int cuFuncSetAttribute(Function* function, int attribute, int value) {
  if (!is_function(function)) return refuse(INVALID_HANDLE, "no such function");
  if (attribute != 8 || value < 0 || value > PLAYED_SHARED_BYTES)
    return refuse(INVALID_VALUE, "only dynamic shared memory (8) within the limit is played");
  function->most_shared = value;
  return OK;
}
int cuLaunchKernelEx(const Config* how, Function* function, void** parameters, void** extra) {
  if (!is_function(function) || !known(how->stream))
    return refuse(INVALID_HANDLE, "no such function, or no such stream");
  const auto blocks = how->grid[0], threads = how->block[0];
  const bool flat = how->grid[1] == 1 && how->grid[2] == 1 && how->block[1] == 1 && how->block[2] == 1;
  if (!blocks || !threads || threads > 1024 || !flat || extra)
    return refuse(INVALID_VALUE, "a launch needs a flat grid and 1 to 1024 threads a block");
  if (threads > MOST_THREADS || how->shared_bytes > function->most_shared)
    return refuse(OUT_OF_RESOURCES, "more threads or shared memory than the function allows");
  for (unsigned i = 0; i < how->n_attributes; ++i) {
    const auto& [id, value] = how->attributes[i];
    const bool cluster = id == 4 && value[0] > 1 && blocks % value[0] == 0 && value[0] <= 8 &&
                         value[1] == 1 && value[2] == 1;
    if (!cluster && !(id == 5 && value[0] <= 2))
      return refuse(INVALID_VALUE, "only clusters (4) of several blocks that divide the grid, and their policy (5)");
  }
  const auto kernel = function->bind(parameters);
  if (!kernel) return refuse(INVALID_VALUE, "an argument cannot be what its parameter is");
  const auto played = threads < PLAYED_THREADS ? threads : PLAYED_THREADS;
  submit(how->stream, [=] { run_grid(blocks, played, kernel); });
  return OK;
}
int cuGetErrorString(int status, const char** words) {
  static const std::map<int, const char*> known{{INVALID_VALUE, "invalid argument"},
                                                {INVALID_IMAGE, "device kernel image is invalid"},
                                                {INVALID_HANDLE, "invalid resource handle"},
                                                {NOT_FOUND, "named symbol not found"},
                                                {OUT_OF_RESOURCES, "too many resources requested"}};
  const auto found = known.find(status);
  *words = found == known.end() ? nullptr : found->second;
  return found == known.end() ? INVALID_VALUE : OK;
}

// -- NVRTC: a token for an image, where there is no real one ---------------------------------------

struct Program {
  std::string source, log, image;
};
static int complain(Program* program, const std::string& why) {
  program->log = "ddlkit.cu(1): error: " + why + "\n";
  return 6;
}
int nvrtcCreateProgram(Program** made, const char* source, const char*, int headers, const char**,
                       const char**) {
  *made = new Program{source};
  return headers ? 3 : 0;
}
int nvrtcCompileProgram(Program* program, int n, const char** options) {
  std::string architecture;
  for (int i = 0; i < n; ++i) {
    const std::string option = options[i];
    const auto begins = [&](const char* with) { return option.rfind(with, 0) == 0; };
    if (begins("--gpu-architecture=sm_")) architecture = option.substr(19);
    if (!begins("--gpu-architecture=") && !begins("--maxrregcount=") && !begins("-D")) return 5;
  }
  if (architecture.empty()) return complain(program, "no architecture is named");
  for (const auto& [name, _] : functions)
    if (program->source.find(name + "(") == std::string::npos)
      return complain(program, "the source has no " + name);
  program->image = "\x7f" "ELF: a token for the played driver, compiled by nobody for " + architecture;
  return 0;
}
int nvrtcGetProgramLogSize(Program* program, std::size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}
int nvrtcGetProgramLog(Program* program, char* log) {
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return 0;
}
int nvrtcGetCUBINSize(Program* program, std::size_t* size) {
  *size = program->image.size();
  return program->image.empty() ? 4 : 0;
}
int nvrtcGetCUBIN(Program* program, char* image) {
  std::memcpy(image, program->image.data(), program->image.size());
  return 0;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}

}  // extern "C"
