// Elements of a matrix in the order of packed weights (packing.py).
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

// Order of packed weights, [rows / side][groups]{[columns of the group][side], other numbers}.
struct Order {
    int64_t side, columns, group, block;  // columns of a group; bytes from a group, and from `side` rows, to the next
};

template <typename T> struct VectorOf {
    typedef T type __attribute__((vector_size(16)));
};
template <typename T> using Vector = typename VectorOf<T>::type;

template <typename T, int First, size_t... I> Vector<T> zip(Vector<T> a, Vector<T> b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, (First + int(I / 2) + (I % 2 ? int(sizeof...(I)) : 0))...);
}

// Transposes a square of N rows of N elements: each round interleaves the rows of both halves.
template <typename T, size_t N = 16 / sizeof(T)> void transpose(Vector<T> (&rows)[N]) {
    constexpr auto all = std::make_index_sequence<N>();
    for (size_t width = 1; width < N; width *= 2) {
        Vector<T> next[N];
        for (size_t i = 0; i < N / 2; i++) {
            next[2 * i] = zip<T, 0>(rows[i], rows[i + N / 2], all);
            next[2 * i + 1] = zip<T, int(N / 2)>(rows[i], rows[i + N / 2], all);
        }
        std::memcpy(rows, next, sizeof next);
    }
}

// Copies at most `side` rows, which lie in one block.
template <typename T> void pack_block(const uint8_t* from, int64_t stride, int64_t rows, int64_t columns, T flip, const Order& order, uint8_t* out) {
    constexpr int64_t N = 16 / sizeof(T), SIZE = sizeof(T), LINE = 64 / SIZE;
    uint8_t *group = out, *places[LINE];  // of the columns of a line
    int64_t in_group = 0;
    // All rows of a cache line's columns, then the next columns: the lines of both sides stay in the cache.
    for (int64_t line = 0; line < columns; line += LINE) {
        const int64_t count = columns - line < LINE ? columns - line : LINE, whole = count / N * N;
        for (int64_t column = 0; column < count; column++) {
            places[column] = group + in_group * order.side * SIZE;
            if (++in_group == order.columns) in_group = 0, group += order.group;
        }
        const uint8_t* start = from + line * SIZE;
        int64_t row = 0;
        for (; order.columns % N == 0 && row + N <= rows; row += N) {
            for (int64_t column = 0; column < whole; column += N) {
                Vector<T> square[N];
                for (int64_t i = 0; i < N; i++) {
                    std::memcpy(&square[i], start + (row + i) * stride + column * SIZE, 16);
                    square[i] ^= flip;
                }
                transpose<T>(square);
                uint8_t* to = places[column] + row * SIZE;
                for (int64_t i = 0; i < N; i++) std::memcpy(to + i * order.side * SIZE, &square[i], 16);
            }
        }
        const auto single = [&](int64_t row, int64_t column) {
            T one;
            std::memcpy(&one, start + row * stride + column * SIZE, SIZE);
            one ^= flip;
            std::memcpy(places[column] + row * SIZE, &one, SIZE);
        };
        for (int64_t done = 0; done < row; done++)
            for (int64_t column = whole; column < count; column++) single(done, column);
        for (; row < rows; row++)
            for (int64_t column = 0; column < count; column++) single(row, column);
    }
}

template <typename T> void pack(const uint8_t* from, int64_t stride, int64_t at, int64_t rows, int64_t columns, int64_t flip, const Order& order, uint8_t* out) {
    while (rows > 0) {
        const int64_t place = at % order.side, room = order.side - place, count = rows < room ? rows : room;
        pack_block<T>(from, stride, count, columns, T(flip), order, out + at / order.side * order.block + place * int64_t(sizeof(T)));
        from += count * stride, at += count, rows -= count;
    }
}

}  // namespace

extern "C" {

// Copies rows to rows `at` … of packed weights. size: bytes of an element. stride: bytes from a row of `from` to the
// next. flip: bits to invert in each element. The others: Order.
void slipway_pack_words(int64_t size, const uint8_t* from, int64_t stride, int64_t at, int64_t rows, int64_t columns, int64_t flip, int64_t side, int64_t group_columns, int64_t group, int64_t block, uint8_t* out) {
    const Order order{side, group_columns, group, block};
    switch (size) {
    case 1: return pack<uint8_t>(from, stride, at, rows, columns, flip, order, out);
    case 2: return pack<uint16_t>(from, stride, at, rows, columns, flip, order, out);
    default: return pack<uint32_t>(from, stride, at, rows, columns, flip, order, out);
    }
}

}  // extern "C"
