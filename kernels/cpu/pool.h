// Threads that run one function together, its work handed out in small pieces from a counter.
//
// A barrier spins a little and then yields: where another process wants the core, a waiting thread gives it away, and a
// thread that lost its core costs one piece of work, not its half of a layer.
#pragma once

#include <atomic>
#include <sched.h>
#include <thread>
#include <vector>

static inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    explicit Team(int size) : size(size) {
        for (int id = 1; id < size; id++) threads.emplace_back([this, id] { serve(id); });
    }
    ~Team() {
        ending = true;
        turn.fetch_add(1);
        turn.notify_all();
        for (auto& thread : threads) thread.join();
    }

    // Calls work(id) on every thread of the team, the caller being thread 0, and returns when all are done.
    template <class Work> void run(Work& work) {
        call = [](void* it, int id) { (*static_cast<Work*>(it))(id); };
        what = &work;
        next.store(0, std::memory_order_relaxed);
        turn.fetch_add(1, std::memory_order_release);
        if (size > 1) turn.notify_all();
        work(0);
        wait();  // `work` lives on the caller's stack
    }

    // The next `step` of `count` pieces in [begin, end); false when there are none left.
    bool take(int64_t count, int64_t step, int64_t& begin, int64_t& end) {
        begin = next.fetch_add(step, std::memory_order_relaxed);
        if (begin >= count) return false;
        end = begin + step < count ? begin + step : count;
        return true;
    }

    // All threads of the team come here; then pieces are counted from 0 again.
    void wait() {
        if (size == 1) { next.store(0, std::memory_order_relaxed); return; }
        int now = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            next.store(0, std::memory_order_relaxed);
            phase.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase.load(std::memory_order_acquire) == now; spins++) {
            if (spins < 1500) pause_cpu(); else sched_yield();
        }
    }

    const int size;

  private:
    void serve(int id) {
        unsigned seen = 0;
        for (;;) {
            // A step follows the last one within microseconds in steady decoding: worth a short wait before sleeping.
            for (int spins = 0; spins < 4000 && turn.load(std::memory_order_acquire) == seen; spins++) pause_cpu();
            turn.wait(seen, std::memory_order_acquire);
            seen++;
            if (ending) return;
            call(what, id);
            wait();
        }
    }

    std::vector<std::thread> threads;
    void (*call)(void*, int) = nullptr;
    void* what = nullptr;
    std::atomic<bool> ending{false};
    alignas(64) std::atomic<unsigned> turn{0};
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> phase{0};
};
