/* The heat equation in C, coupled through a socket: cc -O2 -o heat heat.c -lm
   d5suite.workflows.external says what goes through the socket. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define POINTS 24
#define WIDTH (POINTS + 2)

static int64_t at(int row, int column) { return row * WIDTH + column; }

static void exchange(int stream, void *bytes, size_t count, int gives) {
    for (char *next = bytes; count > 0;) {
        ssize_t moved = gives ? write(stream, next, count) : read(stream, next, count);
        if (moved <= 0) exit(1);
        next += moved, count -= (size_t)moved;
    }
}

int main(void) {
    static double now[WIDTH * WIDTH], later[WIDTH * WIDTH], rows[POINTS][POINTS];
    const double pi = acos(-1.0), h = 1.0 / (POINTS + 1);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, getenv("D5SUITE_SOCKET"), sizeof address.sun_path - 1);
    int stream = socket(AF_UNIX, SOCK_STREAM, 0), steps = atoi(getenv("D5SUITE_STEPS"));
    if (connect(stream, (struct sockaddr *)&address, sizeof address)) return 1;
    char said[128];
    int length = snprintf(said, sizeof said, "give snapshots temperature float64 K %d %d\n\n", POINTS, POINTS);
    exchange(stream, said, (size_t)length, 1);
    for (int i = 1; i <= POINTS; i++)
        for (int j = 1; j <= POINTS; j++) now[at(i, j)] = sin(pi * h * i) * sin(2 * pi * h * j);
    for (int64_t step = 0; step < steps; step++) {
        for (int n = 0; n < 10; n++) {
            for (int i = 1; i <= POINTS; i++)
                for (int j = 1; j <= POINTS; j++)
                    later[at(i, j)] = now[at(i, j)] + 0.2 * (now[at(i - 1, j)] + now[at(i + 1, j)] + now[at(i, j - 1)] +
                                                             now[at(i, j + 1)] - 4 * now[at(i, j)]);
            memcpy(now, later, sizeof now);
        }
        for (int i = 0; i < POINTS; i++) memcpy(rows[i], &now[at(i + 1, 1)], sizeof rows[i]);
        int64_t head[3] = {1, 0, step}, answer; /* give, to the first coupling that was named */
        exchange(stream, head, sizeof head, 1);
        exchange(stream, rows, sizeof rows, 1);
        exchange(stream, &answer, sizeof answer, 0);
    }
    return close(stream);
}
