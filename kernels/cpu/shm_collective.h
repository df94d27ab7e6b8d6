// All-reduce and all-gather in shared memory. The ranks of one model on one host are separate processes: every rank
// writes its rows to its own buffer, announces them, waits for the others, and reads their rows. Sums are added from
// rank 0 on, element by element, so no number depends on the other rows.
//
// Two buffers alternate: a rank that is ahead writes to the buffer that the others do not read. It returns to the first
// only after all ranks have arrived in the second, and each rank arrives there after it has read the first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <new>

#include "pool.h"
#include "program.h"

struct ShmCollective {
    struct alignas(64) Word {
        std::atomic<uint64_t> value;
    };
    static_assert(std::atomic<uint64_t>::is_always_lock_free, "the words are shared by processes");
    static constexpr int64_t PAGE = 4096;

    // memory: initially zero, mapped by all ranks: word 0 is not 0 after an abort, word 1 + r counts the arrivals of
    // rank r; then the two buffers, [2][size][floats].
    ShmCollective(void* memory, int rank, int size, int64_t floats)
        : rank(rank), size(size), floats(floats), words(static_cast<Word*>(memory)),
          buffers(reinterpret_cast<float*>(static_cast<char*>(memory) + head(size))) {}

    static int64_t head(int size) { return (int64_t(sizeof(Word)) * (1 + size) + PAGE - 1) / PAGE * PAGE; }
    static int64_t bytes(int size, int64_t floats) { return head(size) + 2 * size * floats * int64_t(sizeof(float)); }

    float* buffer(int of, uint64_t turn) const { return buffers + (int64_t(turn % 2) * size + of) * floats; }

    // Announces that this rank has written turn + 1, and waits for all ranks. Returns false if the collective is
    // aborted.
    bool synchronize() {
        turn++;
        words[1 + rank].value.store(turn, std::memory_order_release);
        for (int other = 0; other < size; other++)
            for (int64_t tries = 0; words[1 + other].value.load(std::memory_order_acquire) < turn; tries++) {
                if (aborted()) return false;
                if (tries < 2000) pause_cpu();
                else if (tries < 2100) sched_yield();
                else {
                    const timespec rest{0, 50000};
                    nanosleep(&rest, nullptr);
                }
            }
        return !aborted();  // a rank may be lost after its arrival
    }

    bool aborted() const { return words[0].value.load(std::memory_order_relaxed); }

    const int rank, size;
    const int64_t floats;
    Word* const words;
    float* const buffers;
    uint64_t turn = 0;  // of this rank
};

// The shared columns of rank `of`.
static inline int64_t first_column(const AllReduce& op, int of) {
    return op.gathers ? op.total * of / op.collective->size : 0;
}
static inline int64_t columns(const AllReduce& op, int of) {
    return op.gathers ? first_column(op, of + 1) - first_column(op, of) : op.total;
}
static inline int64_t buffer_stride(const AllReduce& op) {
    return op.gathers ? (op.total + op.collective->size - 1) / op.collective->size : op.total;
}

static inline void publish_row(const AllReduce& op, int64_t token) {
    const ShmCollective& collective = *op.collective;
    float* buffer = collective.buffer(collective.rank, collective.turn + 1) + token * buffer_stride(op);
    std::memcpy(buffer, op.x + token * op.x_stride, size_t(columns(op, collective.rank)) * sizeof(float));
}

static inline void reduce_row(const AllReduce& op, int64_t token) {
    const ShmCollective& collective = *op.collective;
    float* y = op.y + token * op.y_stride;
    for (int of = 0; of < collective.size; of++) {
        const float* theirs = collective.buffer(of, collective.turn) + token * buffer_stride(op);
        if (op.gathers || of == 0)
            std::memcpy(y + first_column(op, of), theirs, size_t(columns(op, of)) * sizeof(float));
        else
            for (int64_t i = 0; i < op.total; i++) y[i] += theirs[i];
    }
}

extern "C" {

int64_t slipway_collective_bytes(int64_t size, int64_t floats) { return ShmCollective::bytes(int(size), floats); }

void* slipway_collective_open(void* memory, int64_t rank, int64_t size, int64_t floats) {
    return new (std::nothrow) ShmCollective(memory, int(rank), int(size), floats);
}

void slipway_collective_close(void* collective) { delete static_cast<ShmCollective*>(collective); }

void slipway_collective_abort(void* collective) {
    static_cast<ShmCollective*>(collective)->words[0].value.store(1, std::memory_order_relaxed);
}

// out: [size][bytes], x of every rank. Returns 1 if the collective is aborted, else 0.
int64_t slipway_collective_gather(void* collective, const char* x, char* out, int64_t bytes) {
    ShmCollective& it = *static_cast<ShmCollective*>(collective);
    const int64_t buffer_bytes = it.floats * int64_t(sizeof(float));
    for (int64_t at = 0; at < bytes; at += buffer_bytes) {
        const size_t count = size_t(std::min(buffer_bytes, bytes - at));
        std::memcpy(it.buffer(it.rank, it.turn + 1), x + at, count);
        if (!it.synchronize()) return 1;
        for (int of = 0; of < it.size; of++) std::memcpy(out + of * bytes + at, it.buffer(of, it.turn), count);
    }
    return 0;
}

}  // extern "C"
