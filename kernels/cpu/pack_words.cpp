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

// Calls part(from, rows, out) for the rows of each block. size: bytes of an element.
template <typename Part> void each_block(const uint8_t* from, int64_t stride, int64_t at, int64_t rows, int64_t size, const Order& order, uint8_t* out, Part part) {
    while (rows > 0) {
        const int64_t place = at % order.side, room = order.side - place, count = rows < room ? rows : room;
        part(from, count, out + at / order.side * order.block + place * size);
        from += count * stride, at += count, rows -= count;
    }
}

template <typename T> void pack(const uint8_t* from, int64_t stride, int64_t at, int64_t rows, int64_t columns, int64_t flip, const Order& order, uint8_t* out) {
    each_block(from, stride, at, rows, sizeof(T), order, out, [&](const uint8_t* start, int64_t count, uint8_t* to) {
        pack_block<T>(start, stride, count, columns, T(flip), order, to);
    });
}

// Integers of a file (kernels/stored_codes.py): of 8 bits with 128 for zero or signed; of 4 bits with neighbours in a
// byte, or in blocks of 32 with 16 in the low halves of 16 bytes. Packed words have 128 for zero, and of two words of 4
// bits the first in the low halves of the bytes.
enum Codes : int64_t { UNSIGNED, SIGNED, NEIGHBOURS, HALVES };

template <typename T, size_t... I> Vector<T> each_second(Vector<T> a, Vector<T> b, int first, std::index_sequence<I...>) {
    return first ? __builtin_shufflevector(a, b, int(2 * I + 1)...) : __builtin_shufflevector(a, b, int(2 * I)...);
}

// 16 bytes of a file as 16 bytes of packed words of T. Also one word of NEIGHBOURS.
template <typename T, int64_t CODES, typename V> V packed_codes(V codes) {
    constexpr T ONES = T(0x01010101);
    if constexpr (CODES == SIGNED) return codes ^ T(ONES * 0x80);
    if constexpr (CODES == NEIGHBOURS && sizeof(T) == 4) {  // codes 0 to 7 of a word in the order 0 4 1 5 2 6 3 7
        const V pairs = (codes & 0xff0000ffu) | (codes & 0x0000ff00u) << 8 | (codes & 0x00ff0000u) >> 8;
        return (pairs & 0xf00ff00fu) | (pairs & 0x00f000f0u) << 4 | (pairs & 0x0f000f00u) >> 4;
    }
    if constexpr (CODES == HALVES) {
        constexpr auto all = std::make_index_sequence<16 / sizeof(T)>();
        const V low = codes & T(ONES * 15), high = (codes >> 4) & T(ONES * 15);
        return each_second<T>(low, high, 0, all) | each_second<T>(low, high, 1, all) << 4;
    }
    return codes;
}

// Rows of chunks of 16 bytes. A block of `chunks` has `block` bytes of the file.
struct CodeRows {
    int64_t stride, chunks, block_chunks, block;
};

template <typename T, int64_t CODES> void pack_codes_block(const uint8_t* from, const CodeRows& source, int64_t rows, const Order& order, uint8_t* out) {
    constexpr int64_t N = 16 / sizeof(T), SIZE = sizeof(T), LINE = 4;
    const int64_t group_chunks = order.columns / N;
    const uint8_t *block = from, *starts[LINE];
    uint8_t *group = out, *places[LINE];
    int64_t in_block = 0, in_group = 0;
    // All rows of a few chunks, then the next chunks: rows whose distance is a power of two share a set of the cache.
    for (int64_t chunk = 0; chunk < source.chunks; chunk += LINE) {
        const int64_t chunks = source.chunks - chunk < LINE ? source.chunks - chunk : LINE;
        for (int64_t c = 0; c < chunks; c++) {
            starts[c] = block + in_block * 16, places[c] = group + in_group * order.side * 16;
            if (++in_block == source.block_chunks) in_block = 0, block += source.block;
            if (++in_group == group_chunks) in_group = 0, group += order.group;
        }
        int64_t row = 0;
        for (; row + N <= rows; row += N)
            for (int64_t c = 0; c < chunks; c++) {
                Vector<T> square[N];
                for (int64_t i = 0; i < N; i++) {
                    std::memcpy(&square[i], starts[c] + (row + i) * source.stride, 16);
                    square[i] = packed_codes<T, CODES>(square[i]);
                }
                transpose<T>(square);
                for (int64_t i = 0; i < N; i++) std::memcpy(places[c] + (i * order.side + row) * SIZE, &square[i], 16);
            }
        for (; row < rows; row++)
            for (int64_t c = 0; c < chunks; c++) {
                Vector<T> one;
                std::memcpy(&one, starts[c] + row * source.stride, 16);
                one = packed_codes<T, CODES>(one);
                for (int64_t i = 0; i < N; i++) std::memcpy(places[c] + (i * order.side + row) * SIZE, (const uint8_t*)&one + i * SIZE, size_t(SIZE));
            }
    }
}

template <typename T> void pack_codes(int64_t codes, const uint8_t* from, const CodeRows& source, int64_t at, int64_t rows, const Order& order, uint8_t* out) {
    each_block(from, source.stride, at, rows, sizeof(T), order, out, [&](const uint8_t* start, int64_t count, uint8_t* to) {
        switch (codes) {
        case UNSIGNED: return pack_codes_block<T, UNSIGNED>(start, source, count, order, to);
        case SIGNED: return pack_codes_block<T, SIGNED>(start, source, count, order, to);
        case NEIGHBOURS: return pack_codes_block<T, NEIGHBOURS>(start, source, count, order, to);
        default: return pack_codes_block<T, HALVES>(start, source, count, order, to);
        }
    });
}

template <int64_t CODES> void pack_columns_block(const uint8_t* from, int64_t stride, int64_t rows, int64_t columns, const Order& order, uint8_t* out) {
    for (int64_t column = 0; column < columns; column++) {
        const uint8_t* start = from + column * stride;
        uint8_t* to = out + column / order.columns * order.group + column % order.columns * order.side * 4;
        for (int64_t row = 0; row < rows; row++) {
            uint32_t word;
            std::memcpy(&word, start + row * 4, 4);
            word = packed_codes<uint32_t, CODES>(word);
            std::memcpy(to + row * 4, &word, 4);
        }
    }
}

constexpr int ACROSS[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // output in each 4 bits of a word, from the lowest bits on

// Integers of 4 bits in words of 8 outputs of one input, [inputs][words]. 8 words of 8 inputs become one word for each
// output, in the order of NEIGHBOURS' packed words. A cache line of words at a time.
void pack_across(const uint8_t* from, int64_t stride, int64_t at, int64_t words, int64_t inputs, const Order& order, uint8_t* out) {
    constexpr int64_t LINE = 16;
    for (int64_t first = 0; first < words; first += LINE) {
        const int64_t count = words - first < LINE ? words - first : LINE;
        for (int64_t column = 0; column < inputs / 8; column++) {
            uint32_t given[8][LINE] = {}, made[8][LINE] = {};
            for (int64_t k = 0; k < 8; k++) std::memcpy(given[k], from + (8 * column + k) * stride + first * 4, size_t(count) * 4);
            for (int i = 0; i < 8; i++)
                for (int k = 0; k < 8; k++)
                    for (int64_t j = 0; j < LINE; j++) made[i][j] |= (given[k][j] >> 4 * i & 15) << 4 * (k < 4 ? 2 * k : 2 * k - 7);
            uint8_t* to = out + column / order.columns * order.group + column % order.columns * order.side * 4;
            for (int64_t j = 0; j < count; j++)
                for (int i = 0; i < 8; i++) {
                    const int64_t output = at + 8 * (first + j) + ACROSS[i];
                    std::memcpy(to + output / order.side * order.block + output % order.side * 4, &made[i][j], 4);
                }
        }
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

// Copies integers of a file to rows `at` … of packed weights. codes: Codes. word: bytes of a packed word, 4 or 1. stride:
// bytes from a row of `from` to the next. chunks: 16 bytes each, of a row, and of a block; block: bytes from a block to
// the next. The others: Order.
void slipway_pack_codes(int64_t codes, int64_t word, const uint8_t* from, int64_t stride, int64_t chunks, int64_t block_chunks, int64_t block, int64_t at, int64_t rows, int64_t side, int64_t group_columns, int64_t group, int64_t packed_block, uint8_t* out) {
    const Order order{side, group_columns, group, packed_block};
    const CodeRows source{stride, chunks, block_chunks, block};
    if (word == 4) pack_codes<uint32_t>(codes, from, source, at, rows, order, out);
    else pack_codes<uint8_t>(codes, from, source, at, rows, order, out);
}

// Copies words of 4 bytes of a file that has those of one column next to each other. codes: UNSIGNED or NEIGHBOURS.
// stride: bytes from a column of `from` to the next.
void slipway_pack_columns(int64_t codes, const uint8_t* from, int64_t stride, int64_t at, int64_t rows, int64_t columns, int64_t side, int64_t group_columns, int64_t group, int64_t block, uint8_t* out) {
    const Order order{side, group_columns, group, block};
    each_block(from, 4, at, rows, 4, order, out, [&](const uint8_t* start, int64_t count, uint8_t* to) {
        if (codes == NEIGHBOURS) pack_columns_block<NEIGHBOURS>(start, stride, count, columns, order, to);
        else pack_columns_block<UNSIGNED>(start, stride, count, columns, order, to);
    });
}

// Copies words of 8 outputs to packed words of 4 bytes. at: first output. words: of an input. stride: bytes from an
// input's words to those of the next.
void slipway_pack_across(const uint8_t* from, int64_t stride, int64_t at, int64_t words, int64_t inputs, int64_t side, int64_t group_columns, int64_t group, int64_t block, uint8_t* out) {
    pack_across(from, stride, at, words, inputs, Order{side, group_columns, group, block}, out);
}

}  // extern "C"
