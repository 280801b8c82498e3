// The marks of prefill_hopper.py in the small: 128 producer threads and 128 consumer threads, a ring of two places whose
// `ready` is signalled by cp.async.mbarrier.arrive.noinc of every producer and whose `empty` by one consumer thread behind
// a barrier of all. Producers read the mark of a place a round of the ring later, just as it was written.
//   noinc    read -> noinc arrival -> consumers' wait -> write two rounds later (WAR): that arrival is the only edge
//   regular  the same, with one more arrival of thread 0 behind a barrier of the producers
//   each     the same, with one more arrival of every producer, and no barrier
//   first    as `regular` without the barrier: orders thread 0's reads alone; a race by the book
//   back     the producers read, behind their arrival, what the consumers write at that tile: a true race
// and the other direction, a word a producer writes before its arrival and every consumer reads (RAW):
//   raw-noinc, raw-regular
#include <cstdio>
#include <cstdint>
#include <cuda_runtime.h>
enum { NOINC, REGULAR, EACH, FIRST, BACK, RAW_NOINC, RAW_REGULAR };
const int TILES = 12, S = 2;

__device__ __forceinline__ uint32_t at(const volatile void* p) { return (uint32_t)__cvta_generic_to_shared((const void*)p); }
__device__ __forceinline__ void init(uint64_t* b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(b)), "r"(n) : "memory"); }
__device__ __forceinline__ void arrive(uint64_t* b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at(b)) : "memory"); }
__device__ __forceinline__ void arrive_noinc(uint64_t* b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at(b)) : "memory"); }
__device__ __forceinline__ void copy16(void* to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at(to)), "l"(from) : "memory"); }
__device__ __forceinline__ void await(uint64_t* b, int phase) {
  asm volatile("{\n.reg .pred p;\nw:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra.uni w;\n}" ::"r"(at(b)), "r"(phase) : "memory");
}
template <int ID> __device__ __forceinline__ void some() { asm volatile("bar.sync %0, 128;" ::"n"(ID) : "memory"); }

template <int F> __global__ void __launch_bounds__(256, 1) marks_kernel(int* out, const int4* in) {
  __shared__ int4 buffer[S][128];
  __shared__ uint64_t ready[S], empty[S];
  __shared__ volatile int mark[2 * S], word[2 * S];
  int me = threadIdx.x % 128, sum = 0;
  if (threadIdx.x < 2 * S) mark[threadIdx.x] = 0;
  if (threadIdx.x == 0)
    for (int s = 0; s < S; s++) init(&ready[s], F == REGULAR || F == FIRST || F == RAW_REGULAR ? 129 : F == EACH ? 256 : 128), init(&empty[s], 1);
  __syncthreads();
  if (threadIdx.x >= 128) {
#pragma unroll 1
    for (int i = 0; i < TILES; i++) {
      int s = i % S, before = ((i / S & 1) ^ 1) * S + s;
      await(&empty[s], (i / S & 1) ^ 1);
      if (F == BACK) copy16(&buffer[s][me], in + me), arrive_noinc(&ready[s]);
      if (F == RAW_NOINC || F == RAW_REGULAR) { if (me == 5) word[(i / S & 1) * S + s] = i; }
      else if (F == BACK) sum += mark[(i / S & 1) * S + s] & 0;
      else sum += mark[before];
      if (F == BACK) continue;
      copy16(&buffer[s][me], in + me);
      arrive_noinc(&ready[s]);
      if (F == REGULAR || F == RAW_REGULAR) some<1>();
      if (F == REGULAR || F == FIRST || F == RAW_REGULAR) { if (me == 0) arrive(&ready[s]); }
      if (F == EACH) arrive(&ready[s]);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
#pragma unroll 1
    for (int i = 0; i < TILES; i++) {
      int s = i % S, now = (i / S & 1) * S + s;
      await(&ready[s], i / S & 1);
      int4 got = buffer[s][me];
      sum += got.x + got.y + got.z + got.w;
      if (F == RAW_NOINC || F == RAW_REGULAR) sum += word[now];
      else if (me == 0) mark[now] = i;
      some<2>();
      if (me == 0) arrive(&empty[s]);
    }
  }
  out[blockIdx.x * 256 + threadIdx.x] = sum;
}

template <int F> void run(const char* name) {
  const int ctas = 64;
  int *out, got[ctas * 256];
  int4 *in, host[128];
  for (int i = 0; i < 128; i++) host[i] = make_int4(i, 1, 2, 3);
  cudaMalloc(&out, sizeof got);
  cudaMalloc(&in, sizeof host);
  cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice);
  for (int i = 0; i < 3; i++) marks_kernel<F><<<ctas, 256>>>(out, in);
  cudaError_t e = cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost);
  bool good = e == cudaSuccess, raw = F == RAW_NOINC || F == RAW_REGULAR;
  for (int i = 0; i < ctas * 256; i++) {
    int t = i % 256, words = TILES * (TILES - 1) / 2, marks = (TILES - S) * (TILES - S - 1) / 2;
    int expected = t < 128 ? TILES * (t + 6) + (raw ? words : 0) : raw || F == BACK ? 0 : marks;
    good = good && got[i] == expected;
  }
  printf("== %s as expected: %s%s\n", name, good ? "True" : "False", e ? cudaGetErrorString(e) : "");
  fflush(stdout);
}

int main() {
  run<NOINC>("marks-noinc");
  run<REGULAR>("marks-regular");
  run<EACH>("marks-each");
  run<FIRST>("marks-first");
  run<BACK>("marks-back");
  run<RAW_NOINC>("raw-noinc");
  run<RAW_REGULAR>("raw-regular");
}
