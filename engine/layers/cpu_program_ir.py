"""LLVM IR of the runner behind `engine.layers.cpu_program`: a list of kernels, each run by the whole team in turn.

A kernel returns when no work is left to take. A phase is over when one thread has returned and none is inside: nobody
waits for a thread that has not come. Where other programs hold its core the rest do its share; when it comes, phases
that are over have no work for it. A thread that waits for one inside spins, as phases last microseconds; when the other
seems to have lost its core, it sleeps for moments, so that its own becomes free for it. (Yielding instead costs the
waiting thread its share of time in Linux 6.18, even if nobody wants its core.)
"""

PROGRAM_NUM_PHASES = 0  # 64-bit words of a program's head
PROGRAM_PHASES = 8  # where the phases begin, a cache line each
PHASE_WORDS = 8
PHASE_KERNEL = 0  # address of a `void f(i64* job)`
PHASE_JOB = 1
PHASE_STATE = 2  # low half: threads that have entered; high half: those that have returned
_SPINS = 1000  # pauses before it sleeps: some 25 us
_SLEEP_US = 20
_RETURNED = 1 << 32

MODULE = f"""
declare i32 @usleep(i32)
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare void @llvm.x86.sse2.pause()

define internal void @member(ptr %program) {{
entry:
  %at.num = getelementptr i64, ptr %program, i64 {PROGRAM_NUM_PHASES}
  %num = load i64, ptr %at.num
  %phases = getelementptr i64, ptr %program, i64 {PROGRAM_PHASES}
  br label %phase
phase:
  %p = phi i64 [0, %entry], [%p_next, %over]
  %word = mul i64 %p, {PHASE_WORDS}
  %at = getelementptr i64, ptr %phases, i64 %word
  %at.kernel = getelementptr i64, ptr %at, i64 {PHASE_KERNEL}
  %kernel = load ptr, ptr %at.kernel
  %at.job = getelementptr i64, ptr %at, i64 {PHASE_JOB}
  %job = load ptr, ptr %at.job
  %state = getelementptr i64, ptr %at, i64 {PHASE_STATE}
  %before = atomicrmw add ptr %state, i64 1 acq_rel
  call void %kernel(ptr %job)
  %after = atomicrmw add ptr %state, i64 {_RETURNED} acq_rel
  br label %wait
wait:
  %spins = phi i64 [0, %phase], [%spins_next, %again]
  %seen = load atomic i64, ptr %state acquire, align 8
  %entered = trunc i64 %seen to i32
  %high = lshr i64 %seen, 32
  %returned = trunc i64 %high to i32
  %nobody_inside = icmp eq i32 %entered, %returned
  br i1 %nobody_inside, label %over, label %spin
spin:
  call void @llvm.x86.sse2.pause()
  %spins_next = add i64 %spins, 1
  %is_long = icmp sgt i64 %spins, {_SPINS}
  br i1 %is_long, label %sleep, label %again
sleep:
  %ignored = call i32 @usleep(i32 {_SLEEP_US})
  br label %again
again:
  br label %wait
over:
  %p_next = add i64 %p, 1
  %more = icmp slt i64 %p_next, %num
  br i1 %more, label %phase, label %done
done:
  ret void
}}

define void @run(ptr %program, i64 %threads) {{
entry:
  %alone = icmp eq i64 %threads, 1
  br i1 %alone, label %serial, label %parallel
serial:
  call void @member(ptr %program)
  ret void
parallel:
  %team = trunc i64 %threads to i32
  call void @GOMP_parallel(ptr @member, ptr %program, i32 %team, i32 0)
  ret void
}}
"""
