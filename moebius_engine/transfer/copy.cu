// Direct transfer between ranks: copies strips to their final places in the peers' memory, with a fence across ranks
// after every phase. Compiled by NVRTC (kernel.py).
//
// One launch moves many layers. A phase is one tensor of one layer; phases follow each other in the same order on all
// ranks. Block b copies tiles b, b + blocks, ... and then says so; the last block to finish a phase raises this rank's
// flag on every rank. What a phase overwrites has been read, on every rank, in the same tensor's phase one layer
// before (L layers lie in L + 1 slots), so its stores wait for that phase alone: `distance` phases back. The other
// tensor's phase lies between the two, so that in the steady state nobody waits.
//
// Waiting blocks occupy the GPU, which matters where ranks share one: there a rank that waits must not keep out what it
// waits for. So `enter`, one block, first waits until every rank has come this far, with all its other work behind it;
// the copy's blocks are few enough that those of all ranks are resident at once (kernel.py); and the last wait is one
// block's. Seen without: copies that wait on every multiprocessor keep out a slower rank's other kernels.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Strip {
  u32 destination, units, units_per_chunk, magic, shift, padding;
  u64 source_offset, destination_offset, source_pitch, destination_pitch;
  const long long *source_rows, *destination_rows;
};

struct __align__(8) Tile {
  u32 strip, unit;
};

struct Task {
  const Strip* strips;
  const Tile* tiles;       // by tensor
  const u64* bases;        // (phases, 1 + ranks): where the source view starts, and the destination view on each rank
  const u64* peer_flags;   // (ranks): this rank's flag on each rank
  const u64* flags;        // (ranks): each rank's flag here, the number of phases that it has finished
  u32* arrived;            // (phases): blocks of this rank that have finished a phase; 0 between launches
  u64* missed;             // 0, or the rank that missed a deadline + 1 in the upper 16 bits, and its flag below
  u64 begun;               // phases before the first one here, `enter` included
  u64 timeout_ns;
  u32 phases, tensors, distance, ranks;
  u32 first_tile[4], tiles_of[4];  // of each tensor
};

// THREADS of a block, UNROLL words a thread and tile, RESIDENT blocks a multiprocessor: kernel.py.

__device__ __forceinline__ u64 read_flag(const u64* flag) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void raise_flag(u64* flag, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ u64 now_ns() {
  u64 value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// The whole block waits until every rank has finished `wanted` phases. False if one missed the deadline.
__device__ bool wait(const Task& task, u64 wanted) {
  bool late = false;
  if (threadIdx.x < task.ranks && read_flag(task.flags + threadIdx.x) < wanted) {
    const u64 began = now_ns();
    while (!late && read_flag(task.flags + threadIdx.x) < wanted)
      late = now_ns() - began > task.timeout_ns || *(volatile u64*)task.missed;
  }
  if (!__syncthreads_or(late)) return true;
  if (threadIdx.x == 0) {
    u32 slowest = 0;
    u64 least = read_flag(task.flags);
#pragma unroll 1
    for (u32 rank = 1; rank < task.ranks; rank++) {
      const u64 flag = read_flag(task.flags + rank);
      if (flag < least) least = flag, slowest = rank;
    }
    atomicCAS(task.missed, 0ull, ((u64)(slowest + 1) << 48) | least);
  }
  return false;
}

// The block has finished a phase; true in the block that was the last one.
__device__ bool arrive(const Task& task, u32 phase) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    // Makes the whole block's stores visible to all GPUs before the count: fences are cumulative over the barrier.
    fence();
    last = atomicAdd(task.arrived + phase, 1u) == gridDim.x - 1;
    if (last) {
      task.arrived[phase] = 0;
      fence();
#pragma unroll 1
      for (u32 rank = 0; rank < task.ranks; rank++)
        raise_flag((u64*)task.peer_flags[rank], task.begun + phase + 1);
    }
  }
  __syncthreads();
  return last;
}

// The first phase of a launch: nothing is copied, and it is over when every rank has entered. One block.
extern "C" __global__ void enter(const __grid_constant__ Task task) {
  if (*(volatile u64*)task.missed) return;
  if (threadIdx.x < task.ranks) raise_flag((u64*)task.peer_flags[threadIdx.x], task.begun);
  wait(task, task.begun);
}

template <typename Word>
__device__ __forceinline__ void run(const Task& task) {
  __shared__ bool broken;
  if (threadIdx.x == 0) broken = *(volatile u64*)task.missed != 0;
  __syncthreads();
  if (broken) return;  // an earlier launch missed a deadline: touch nothing

  u32 tile = blockIdx.x, first = 0;  // counted over all phases
  for (u32 phase = 0; phase < task.phases; phase++) {
    const u32 tensor = phase % task.tensors, count = task.tiles_of[tensor];
    const u64* bases = task.bases + (u64)phase * (1 + task.ranks);
    const Tile* tiles = task.tiles + task.first_tile[tensor];
    bool may_write = phase < task.distance;
    for (; tile - first < count; tile += gridDim.x) {
      const Tile at = tiles[tile - first];
      const Strip strip = task.strips[at.strip];
      const u64 source = bases[0] + strip.source_offset;
      const u64 destination = bases[1 + strip.destination] + strip.destination_offset;
      u64 from[UNROLL], to[UNROLL];
#pragma unroll
      for (int k = 0; k < UNROLL; k++) {
        // A thread beyond the strip's end reads its last word, and writes nothing: no branch parts the loads.
        const u32 unit = min(at.unit + k * THREADS + threadIdx.x, strip.units - 1);
        const u32 chunk = (__umulhi(unit, strip.magic) + unit) >> strip.shift;
        const u64 inner = (u64)(unit - chunk * strip.units_per_chunk) * sizeof(Word);
        const u64 row = strip.source_rows ? __ldg(strip.source_rows + chunk) : chunk;
        const u64 place = strip.destination_rows ? __ldg(strip.destination_rows + chunk) : chunk;
        from[k] = source + row * strip.source_pitch + inner;
        to[k] = destination + place * strip.destination_pitch + inner;
      }
      Word words[UNROLL];
#pragma unroll
      for (int k = 0; k < UNROLL; k++) words[k] = __ldcg((const Word*)from[k]);
      // The loads above need no fence: nobody overwrites this phase's source before this phase is over.
      if (!may_write && !wait(task, task.begun + phase + 1 - task.distance)) return;
      may_write = true;
#pragma unroll
      for (int k = 0; k < UNROLL; k++)
        if (at.unit + k * THREADS + threadIdx.x < strip.units) __stcg((Word*)to[k], words[k]);
    }
    first += count;
    const bool last = arrive(task, phase);
    // The launch ends when all ranks' bytes have arrived here.
    if (last && phase + 1 == task.phases) wait(task, task.begun + task.phases);
  }
}

#define MOVE(name, Word) \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) name(const __grid_constant__ Task task) { \
    run<Word>(task); \
  }
MOVE(move_16, uint4)
MOVE(move_8, uint2)
MOVE(move_4, unsigned int)
MOVE(move_2, unsigned short)
MOVE(move_1, unsigned char)
