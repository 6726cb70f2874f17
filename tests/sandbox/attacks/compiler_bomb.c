// Has the compiler work for ever. expect: compile_failed | limits: memory_mb=256 wall_seconds=2 | compile_seconds: 1
#define A(x) x x x x x x x x x x
#define B(x) A(A(A(A(x))))
int main(void) { int i = 0; B(B(B(i += 1;))) return i; }
