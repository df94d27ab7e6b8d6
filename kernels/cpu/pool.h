// Team of threads that run one function together. A counter hands out the work in small pieces.
//
// A thread that loses its core delays only its current piece, not half of a layer: the other threads take the rest. A
// barrier spins for about as long as falling asleep and waking takes. Then it yields, so that another process, or a
// thread of the team without a core, can run; then it sleeps. A thread may wait milliseconds for a core in the middle
// of its piece. While the other threads sleep, they neither use up a CPU quota nor lose priority by repeated yields.
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

// Number of CPUs that the calling thread may use, and pinning to one of them; a missing CPU changes nothing.
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
    // cpus: one for each thread, or null. The caller of `run` is the first thread and pins itself.
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

    // Calls work(id) on every thread of the team and returns when all are done. The caller is thread 0.
    template <class Work> void run(Work& work) {
        call = [](void* it, int id) { (*static_cast<Work*>(it))(id); };
        what = &work;
        next.store(0, std::memory_order_relaxed);
        turn.fetch_add(1, std::memory_order_release);
        if (size > 1) turn.notify_all();
        work(0);
        wait();  // `work` is on the caller's stack
    }

    // Takes the next `step` of `count` pieces, [begin, end). Returns false when all are taken.
    bool take(int64_t count, int64_t step, int64_t& begin, int64_t& end) {
        begin = next.fetch_add(step, std::memory_order_relaxed);
        if (begin >= count) return false;
        end = begin + step < count ? begin + step : count;
        return true;
    }

    // Barrier for all threads of the team; then pieces are counted from 0 again.
    void wait() {
        if (size == 1) { next.store(0, std::memory_order_relaxed); return; }
        const int now = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            next.store(0, std::memory_order_relaxed);
            phase.store(now + 1);  // sequentially consistent: must precede the check for sleeping threads
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
            // In steady decoding the next step follows within microseconds, so spin for a short time before sleeping.
            for (int spins = 0; patient && spins < 4000 && turn.load(std::memory_order_acquire) == seen; spins++) pause_cpu();
            turn.wait(seen, std::memory_order_acquire);
            seen++;
            if (ending) return;
            call(what, id);
            wait();
        }
    }

    const bool patient;  // every thread can have its own CPU, so spinning takes none from another
    std::vector<std::thread> threads;
    void (*call)(void*, int) = nullptr;
    void* what = nullptr;
    std::atomic<bool> ending{false};
    alignas(64) std::atomic<unsigned> turn{0};
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> phase{0};
};
