// Threads that run one function together, its work handed out in small pieces from a counter.
//
// A thread that loses its core costs the one piece that it holds, not its half of a layer: the others take the rest. A
// barrier spins for about as long as falling asleep and waking takes; then it yields, so that a process that wants the
// core, or a thread of the team without one, gets it; then it sleeps. Where a piece waits for its thread to be given a
// core again, which takes milliseconds, the others neither use up a quota nor lose their turn by yielding on and on.
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

#if defined(__linux__)
constexpr int MOST_CPUS = 1 << 14;

// How many CPUs the calling thread may use, and letting it use one only; a CPU that is gone leaves it where it was.
static inline int allowed_cpus() {
    cpu_set_t* set = CPU_ALLOC(MOST_CPUS);
    const size_t bytes = CPU_ALLOC_SIZE(MOST_CPUS);
    const int found = sched_getaffinity(0, bytes, set) ? MOST_CPUS : CPU_COUNT_S(bytes, set);
    CPU_FREE(set);
    return found;
}
static inline void pin(int cpu) {
    cpu_set_t* set = CPU_ALLOC(cpu + 1);
    const size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
    CPU_ZERO_S(bytes, set);
    CPU_SET_S(cpu, bytes, set);
    sched_setaffinity(0, bytes, set);
    CPU_FREE(set);
}
#else
static inline int allowed_cpus() { return int(std::thread::hardware_concurrency()); }
static inline void pin(int) {}
#endif

class Team {
  public:
    // cpus: one for each thread, of which the caller of `run`, the first, is pinned by itself; or null.
    explicit Team(int size, const int32_t* cpus = nullptr) : size(size), patient(size <= allowed_cpus()) {
        try {
            for (int id = 1; id < size; id++)
                threads.emplace_back([this, id, cpu = cpus ? cpus[id] : -1] {
                    if (cpu >= 0) pin(cpu);
                    serve(id);
                });
        } catch (...) {
            end();
            throw;
        }
    }
    ~Team() { end(); }

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
        const int now = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            next.store(0, std::memory_order_relaxed);
            phase.store(now + 1);  // sequentially consistent: only then is it looked whether anybody sleeps
            phase.notify_all();
            return;
        }
        auto waits = [&] { return phase.load(std::memory_order_acquire) == now; };
        for (int spins = 0; patient && spins < 1500 && waits(); spins++) pause_cpu();
        for (int yields = 0; yields < 64 && waits(); yields++) sched_yield();
        phase.wait(now, std::memory_order_acquire);
    }

    const int size;

  private:
    void end() {
        ending = true;
        turn.fetch_add(1);
        turn.notify_all();
        for (auto& thread : threads) thread.join();
    }

    void serve(int id) {
        unsigned seen = 0;
        for (;;) {
            // A step follows the last one within microseconds in steady decoding: worth a short wait before sleeping.
            for (int spins = 0; patient && spins < 4000 && turn.load(std::memory_order_acquire) == seen; spins++) pause_cpu();
            turn.wait(seen, std::memory_order_acquire);
            seen++;
            if (ending) return;
            call(what, id);
            wait();
        }
    }

    const bool patient;  // every thread can have a CPU: to spin takes none away from the others
    std::vector<std::thread> threads;
    void (*call)(void*, int) = nullptr;
    void* what = nullptr;
    std::atomic<bool> ending{false};
    alignas(64) std::atomic<unsigned> turn{0};
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> phase{0};
};
