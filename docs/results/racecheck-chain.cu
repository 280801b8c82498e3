// What racecheck makes of an mbarrier that one thread arrives at for others. 128 writers hand words to 128 readers through a
// ring of two places and back; run one case at a time: chain CASE
//   raw-self     the thread that writes is the one that arrives
//   raw-barrier  another thread writes, then bar.sync of the 128 writers, then thread 0 arrives: ordered by PTX
//   raw-each     another thread writes, and every writer arrives
//   raw-planted  another thread writes, thread 0 arrives, no barrier: a race
//   war-barrier  every reader reads, then bar.sync of the 128 readers, then thread 0 hands the place back: ordered by PTX
//   war-each     every reader reads and hands back
//   war-planted  every reader reads, thread 0 hands back, no barrier: a race
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>
enum Hand { SELF, BARRIER, EACH, PLANTED };
const int TILES = 8, S = 2;

__device__ uint32_t at(const volatile void* p) { return (uint32_t)__cvta_generic_to_shared((const void*)p); }
__device__ void init(uint64_t* b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(b)), "r"(n) : "memory"); }
__device__ void arrive(uint64_t* b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at(b)) : "memory"); }
__device__ void await(uint64_t* b, int phase) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra.uni again;\n}" ::"r"(at(b)), "r"(phase) : "memory");
}
template <int ID> __device__ void meet() { asm volatile("bar.sync %0, 128;" ::"n"(ID) : "memory"); }

template <int TO, int BACK> __global__ void __launch_bounds__(256, 1) chain(int* out) {
  __shared__ uint64_t ready[S], empty[S];
  __shared__ volatile int word[S];
  int me = threadIdx.x % 128, sum = 0;
  if (threadIdx.x == 0)
    for (int s = 0; s < S; s++) init(&ready[s], TO == EACH ? 128 : 1), init(&empty[s], BACK == EACH ? 128 : 1);
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < TILES; i++) {
    int s = i % S, phase = i / S & 1;
    if (threadIdx.x < 128) {
      await(&empty[s], phase ^ 1);
      if (me == (TO == SELF ? 0 : 37)) word[s] = i;
      if (TO == BARRIER) meet<1>();
      if (TO == EACH || me == 0) arrive(&ready[s]);
    } else {
      await(&ready[s], phase);
      sum += word[s];
      if (BACK == BARRIER) meet<2>();
      if (BACK == EACH || me == 0) arrive(&empty[s]);
    }
  }
  if (threadIdx.x >= 128) out[blockIdx.x * 128 + me] = sum;
}

template <int TO, int BACK> void run(const char* name) {
  int *out, got[8 * 128];
  cudaMalloc(&out, sizeof got);
  chain<TO, BACK><<<8, 256>>>(out);
  cudaError_t e = cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost);
  bool good = e == cudaSuccess;
  for (int each : got) good = good && each == TILES * (TILES - 1) / 2;
  printf("== %s as expected: %s%s\n", name, good ? "True" : "False", e ? cudaGetErrorString(e) : "");
}

int main(int n, char** name) {
  const char* wanted = n > 1 ? name[1] : "";
  if (!strcmp(wanted, "raw-self")) run<SELF, EACH>(wanted);
  if (!strcmp(wanted, "raw-barrier")) run<BARRIER, EACH>(wanted);
  if (!strcmp(wanted, "raw-each")) run<EACH, EACH>(wanted);
  if (!strcmp(wanted, "raw-planted")) run<PLANTED, EACH>(wanted);
  if (!strcmp(wanted, "war-barrier")) run<SELF, BARRIER>(wanted);
  if (!strcmp(wanted, "war-each")) run<SELF, EACH>(wanted);
  if (!strcmp(wanted, "war-planted")) run<SELF, PLANTED>(wanted);
}
