"""LLVM IR of the runner behind `engine.layers.cpu_program`: a list of kernels, each run by the whole team in turn.

A barrier between two phases is one shared counter that only grows: a thread adds itself and waits until all have. It
spins, because phases last microseconds, and gives its core away when another program seems to hold the last thread's.
"""

PROGRAM_NUM_PHASES = 0  # 64-bit words of a program's head; counters have cache lines of their own
PROGRAM_ARRIVED = 8
PROGRAM_PHASES = 16  # pairs: address of a `void f(i64* job)`, address of the job
_SPINS = 4000  # pauses before the core is given away: some 50 us

MODULE = f"""
declare i32 @omp_get_num_threads()
declare i32 @sched_yield()
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare void @llvm.x86.sse2.pause()

define internal void @member(ptr %program) {{
entry:
  %team_32 = call i32 @omp_get_num_threads()
  %team = zext i32 %team_32 to i64
  %at.num = getelementptr i64, ptr %program, i64 {PROGRAM_NUM_PHASES}
  %num = load i64, ptr %at.num
  %arrived = getelementptr i64, ptr %program, i64 {PROGRAM_ARRIVED}
  %phases = getelementptr i64, ptr %program, i64 {PROGRAM_PHASES}
  br label %phase
phase:
  %p = phi i64 [0, %entry], [%p_next, %passed]
  %all = phi i64 [%team, %entry], [%all_next, %passed]
  %word = mul i64 %p, 2
  %at.kernel = getelementptr i64, ptr %phases, i64 %word
  %kernel = load ptr, ptr %at.kernel
  %at.job = getelementptr i64, ptr %at.kernel, i64 1
  %job = load ptr, ptr %at.job
  call void %kernel(ptr %job)
  %before = atomicrmw add ptr %arrived, i64 1 acq_rel
  br label %wait
wait:
  %spins = phi i64 [0, %phase], [%spins_next, %again]
  %seen = load atomic i64, ptr %arrived acquire, align 8
  %is_last = icmp sge i64 %seen, %all
  br i1 %is_last, label %passed, label %spin
spin:
  call void @llvm.x86.sse2.pause()
  %spins_next = add i64 %spins, 1
  %is_long = icmp sgt i64 %spins, {_SPINS}
  br i1 %is_long, label %yield, label %again
yield:
  %ignored = call i32 @sched_yield()
  br label %again
again:
  br label %wait
passed:
  %p_next = add i64 %p, 1
  %all_next = add i64 %all, %team
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
