// Makes calls by the 32-bit gate and with x32 numbers, where the filter's numbers mean something else.
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void foreign(int which) {
#if defined(__x86_64__)
    long result;
    if (which == 0)  // i386's mkdir
        __asm__ volatile("int $0x80" : "=a"(result) : "a"(39), "b"(0), "c"(0) : "memory");
    else  // x32's getpid
        __asm__ volatile("syscall" : "=a"(result) : "a"(0x40000000L + 39) : "rcx", "r11", "memory");
    _exit(which == 1 && result < 0 ? 3 : 0);
#else
    abort();
#endif
}

int main(void) {
    for (int which = 0; which < 2; which++) {
        int status;
        if (fork() == 0) foreign(which);
        wait(&status);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) puts("BREACH the call was made");
    }
    puts("end");
    return 0;
}
