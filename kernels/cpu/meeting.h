// All-reduce and all-gather in shared memory. The ranks of one model on one host are separate processes: every rank
// writes its rows to its own place, announces them, waits for the others, and reads their rows. Sums are added from
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

struct Meeting {
    struct alignas(64) Word {
        std::atomic<uint64_t> value;
    };
    static_assert(std::atomic<uint64_t>::is_always_lock_free, "the words are shared by processes");
    static constexpr int64_t PAGE = 4096;

    // memory: initially zero, mapped by all ranks: word 0 is not 0 once the meeting is abandoned, word 1 + r counts the
    // arrivals of rank r; then the two buffers, [2][size][floats].
    Meeting(void* memory, int rank, int size, int64_t floats)
        : rank(rank), size(size), floats(floats), words(static_cast<Word*>(memory)),
          rooms(reinterpret_cast<float*>(static_cast<char*>(memory) + head(size))) {}

    static int64_t head(int size) { return (int64_t(sizeof(Word)) * (1 + size) + PAGE - 1) / PAGE * PAGE; }
    static int64_t bytes(int size, int64_t floats) { return head(size) + 2 * size * floats * int64_t(sizeof(float)); }

    float* place(int of, uint64_t turn) const { return rooms + (int64_t(turn % 2) * size + of) * floats; }

    // Announces that this rank has written turn + 1, and waits for all ranks. Returns false if the meeting is
    // abandoned.
    bool meet() {
        turn++;
        words[1 + rank].value.store(turn, std::memory_order_release);
        for (int other = 0; other < size; other++)
            for (int64_t tries = 0; words[1 + other].value.load(std::memory_order_acquire) < turn; tries++) {
                if (abandoned()) return false;
                if (tries < 2000) pause_cpu();
                else if (tries < 2100) sched_yield();
                else {
                    const timespec rest{0, 50000};
                    nanosleep(&rest, nullptr);
                }
            }
        return !abandoned();  // a rank may be lost after its arrival
    }

    bool abandoned() const { return words[0].value.load(std::memory_order_relaxed); }

    const int rank, size;
    const int64_t floats;
    Word* const words;
    float* const rooms;
    uint64_t turn = 0;  // of this rank
};

// The shared columns of rank `of`.
static inline int64_t first_column(const Share& op, int of) { return op.joins ? op.total * of / op.meeting->size : 0; }
static inline int64_t columns(const Share& op, int of) {
    return op.joins ? first_column(op, of + 1) - first_column(op, of) : op.total;
}
static inline int64_t room_stride(const Share& op) {
    return op.joins ? (op.total + op.meeting->size - 1) / op.meeting->size : op.total;
}

static inline void offer_row(const Share& op, int64_t token) {
    const Meeting& meeting = *op.meeting;
    float* place = meeting.place(meeting.rank, meeting.turn + 1) + token * room_stride(op);
    std::memcpy(place, op.x + token * op.x_stride, size_t(columns(op, meeting.rank)) * sizeof(float));
}

static inline void take_row(const Share& op, int64_t token) {
    const Meeting& meeting = *op.meeting;
    float* y = op.y + token * op.y_stride;
    for (int of = 0; of < meeting.size; of++) {
        const float* theirs = meeting.place(of, meeting.turn) + token * room_stride(op);
        if (op.joins || of == 0) std::memcpy(y + first_column(op, of), theirs, size_t(columns(op, of)) * sizeof(float));
        else
            for (int64_t i = 0; i < op.total; i++) y[i] += theirs[i];
    }
}

extern "C" {

int64_t slipway_meeting_bytes(int64_t size, int64_t floats) { return Meeting::bytes(int(size), floats); }

void* slipway_meeting(void* memory, int64_t rank, int64_t size, int64_t floats) {
    return new (std::nothrow) Meeting(memory, int(rank), int(size), floats);
}

void slipway_leave(void* meeting) { delete static_cast<Meeting*>(meeting); }

void slipway_abandon(void* meeting) {
    static_cast<Meeting*>(meeting)->words[0].value.store(1, std::memory_order_relaxed);
}

// out: [size][bytes], x of every rank. Returns 1 if the meeting is abandoned, else 0.
int64_t slipway_gather(void* meeting, const char* x, char* out, int64_t bytes) {
    Meeting& it = *static_cast<Meeting*>(meeting);
    const int64_t room = it.floats * int64_t(sizeof(float));
    for (int64_t at = 0; at < bytes; at += room) {
        const size_t count = size_t(std::min(room, bytes - at));
        std::memcpy(it.place(it.rank, it.turn + 1), x + at, count);
        if (!it.meet()) return 1;
        for (int of = 0; of < it.size; of++) std::memcpy(out + of * bytes + at, it.place(of, it.turn), count);
    }
    return 0;
}

}  // extern "C"
