// Has the compiler read what the program may not. expect: compile_failed
#include "/etc/shadow"
int main(void) { return 0; }
