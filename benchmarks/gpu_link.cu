// Moves stretches between pinned host memory and device memory: by ordinary loads and stores
// (plain_move), and by bulk asynchronous copies through shared memory (bulk_move; compute
// capability 9.0). `source` and `target` are addresses, a pair a stretch; all sizes are multiples
// of 16 bytes. Both return without waiting, 0 or CUDA's error.
#include <cstdint>
#include <cuda_runtime.h>

using u32 = uint32_t;
using u64 = uint64_t;
#define DEVICE __device__ __forceinline__

constexpr int LANES = 32;
constexpr int UNROLL = 4;

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
DEVICE void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE bool arrived(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
DEVICE void wait_for(u32 barrier, u32 parity) {
    u32 tries = 0;  // each try suspends for a while; a lost copy must not hang the machine
    while (!arrived(barrier, parity))
        if (++tries > 20000000u) __trap();
}
DEVICE void bulk_load(u32 to, u64 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void bulk_store(u64 to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEVICE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEVICE void wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// What the asynchronous proxy wrote is ordered before what follows, for the host too.
DEVICE void finish() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    __threadfence_system();
}

// A ring of stages, then their barriers, then where each lane's part of a stage goes and how long
// it is.
__host__ DEVICE u32 barriers_end(u32 stage_bytes, u32 stages) {
    return stages * stage_bytes + ((stages * 8 + 15) & ~15u);
}
__host__ DEVICE u32 shared_bytes(u32 stage_bytes, u32 stages) {
    return barriers_end(stage_bytes, stages) + stages * LANES * (sizeof(u64) + sizeof(u32));
}

// One warp a thread group. A stage takes a piece of one stretch (lane 0 moves it), or as many whole
// stretches as fit (a lane each). While DRAIN stores read their stages, loads fill the others.
template <int DRAIN>
__global__ void __launch_bounds__(LANES) bulk_move(
    const u64* __restrict__ source, const u64* __restrict__ target, u32 stretches, u32 stretch_bytes,
    u32 stage_bytes, u32 stages) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 lane = threadIdx.x;
    const u32 ring = shared_address(memory), barriers = ring + stages * stage_bytes;
    u64* const targets = (u64*)(memory + barriers_end(stage_bytes, stages)) + lane;
    u32* const lengths =
        (u32*)(memory + barriers_end(stage_bytes, stages) + stages * LANES * sizeof(u64)) + lane;
    const u32 group = stage_bytes >= 2 * stretch_bytes ? stage_bytes / stretch_bytes : 1;
    const u32 pieces = group > 1 ? 1 : (stretch_bytes + stage_bytes - 1) / stage_bytes;
    const u32 items = group > 1 ? (stretches + group - 1) / group : stretches * pieces;
    const u32 count = blockIdx.x < items ? (items - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    const u32 here = ring + (group > 1 ? lane * stretch_bytes : 0);

    if (lane == 0) {
        for (u32 s = 0; s < stages; s++) barrier_init(barriers + 8 * s);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();

    // The next item's addresses are fetched while this one's load is asked for.
    u64 from = 0, to = 0;
    u32 offset = 0, length = 0, total = 0, item = blockIdx.x;
    auto fetch = [&]() {
        length = total = 0;
        if (item < items) {
            if (group > 1) {
                u32 stretch = item * group + lane;
                total = min(group, stretches - item * group) * stretch_bytes;
                if (lane < group && stretch < stretches)
                    from = source[stretch], to = target[stretch], length = stretch_bytes;
            } else {
                u32 stretch = item / pieces;
                offset = (item - stretch * pieces) * stage_bytes;
                total = min(stage_bytes, stretch_bytes - offset);
                // The offset is added later: these arrive meanwhile.
                if (lane == 0) from = source[stretch], to = target[stretch], length = total;
            }
        }
        item += gridDim.x;
    };
    auto load = [&](u32 stage) {
        if (lane == 0) expect(barriers + 8 * stage, total);
        __syncwarp();
        targets[stage * LANES] = to + offset;
        lengths[stage * LANES] = length;
        if (length) bulk_load(here + stage * stage_bytes, from + offset, length, barriers + 8 * stage);
        fetch();
    };
    fetch();
    u32 asked = 0;
    for (; asked < min(stages, count); asked++) load(asked);
    u32 stage = 0, parity = 0, refill = 0;
    for (u32 done = 0; done < count; done++) {
        wait_for(barriers + 8 * stage, parity);
        u32 bytes = lengths[stage * LANES];
        if (bytes) bulk_store(targets[stage * LANES], here + stage * stage_bytes, bytes);
        commit();
        if (++stage == stages) stage = 0, parity ^= 1;
        if (done >= DRAIN) {
            wait_read<DRAIN>();
            __syncwarp();
            if (asked < count) load(refill), asked++;
            if (++refill == stages) refill = 0;
        }
    }
    finish();
}

// 16 bytes a thread, UNROLL times; a thread group's threads are adjacent.
__global__ void __launch_bounds__(1024) plain_move(
    const u64* __restrict__ source, const u64* __restrict__ target, u32 stretches, u32 stretch_bytes) {
    const u32 a_stretch = stretch_bytes / 16, all = stretches * a_stretch;
    const u32 tile = blockDim.x * UNROLL;
    for (u32 start = blockIdx.x * tile; start < all; start += gridDim.x * tile) {
        uint4 held[UNROLL];
        u64 to[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            u32 unit = start + threadIdx.x + i * blockDim.x;
            to[i] = 0;
            if (unit < all) {
                u32 stretch = unit / a_stretch;
                u64 offset = (u64)(unit - stretch * a_stretch) * 16;
                to[i] = target[stretch] + offset;
                held[i] = __ldcg((const uint4*)(source[stretch] + offset));
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (to[i]) *(uint4*)to[i] = held[i];
    }
}

template <int DRAIN>
int launch_bulk(const u64* source, const u64* target, u32 stretches, u32 stretch_bytes, int groups,
                u32 stage_bytes, u32 stages, cudaStream_t stream) {
    auto kernel = bulk_move<DRAIN>;
    int bytes = (int)shared_bytes(stage_bytes, stages);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return cudaGetLastError(), (int)error;
    kernel<<<groups, LANES, bytes, stream>>>(source, target, stretches, stretch_bytes, stage_bytes, stages);
    return (int)cudaGetLastError();
}

extern "C" {

int bulk(const u64* source, const u64* target, u32 stretches, u32 stretch_bytes, int groups,
         u32 stage_bytes, u32 stages, u32 drain, cudaStream_t stream) {
    if (drain >= stages || stage_bytes % 16 || stretch_bytes % 16 || stage_bytes / stretch_bytes > LANES)
        return (int)cudaErrorInvalidValue;
    if (drain == 1) return launch_bulk<1>(source, target, stretches, stretch_bytes, groups, stage_bytes, stages, stream);
    if (drain == 3) return launch_bulk<3>(source, target, stretches, stretch_bytes, groups, stage_bytes, stages, stream);
    return (int)cudaErrorInvalidValue;
}

int plain(const u64* source, const u64* target, u32 stretches, u32 stretch_bytes, int groups,
          cudaStream_t stream) {
    plain_move<<<groups, 1024, 0, stream>>>(source, target, stretches, stretch_bytes);
    return (int)cudaGetLastError();
}

const char* message(int status) { return cudaGetErrorString((cudaError_t)status); }

}
