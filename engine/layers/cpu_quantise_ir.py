"""LLVM IR that turns rows of bfloat16 into 16-bit integers with one scale a row, for the int8 matrix kernel."""

WEIGHT_MAX = 127  # largest int8 weight; -128 is not used
_INT32_MAX = 2**31 - 1


def activation_max(k: int) -> int:
    """Largest 16-bit activation with which a sum over k products of int8 weights cannot leave int32."""
    return min(32767, _INT32_MAX // (WEIGHT_MAX * k))


# q[r, i] = round(x[r, i] * limit / largest |x[r]|), row_scale[r] its inverse; size is a multiple of 8. A row that holds
# NaN or infinity gets a scale that is not finite either.
QUANTISE = f"""
declare <8 x float> @llvm.fabs.v8f32(<8 x float>)
declare <8 x i32> @llvm.x86.avx.cvt.ps2dq.256(<8 x float>)
declare float @llvm.vector.reduce.fmaximum.v8f32(<8 x float>)
declare <8 x float> @llvm.maximum.v8f32(<8 x float>, <8 x float>)

define internal void @quantise(ptr noalias %x, ptr noalias %q, ptr noalias %row_scale, i64 %rows, i64 %size) {{
entry:
  %worst = mul i64 %size, {WEIGHT_MAX}
  %room = udiv i64 {_INT32_MAX}, %worst
  %narrow = icmp ult i64 %room, 32767
  %most = select i1 %narrow, i64 %room, i64 32767
  %limit = uitofp i64 %most to float
  br label %row
row:
  %r = phi i64 [0, %entry], [%r_next, %row_end]
  %first = mul i64 %r, %size
  %x_r = getelementptr i16, ptr %x, i64 %first
  %q_r = getelementptr i16, ptr %q, i64 %first
  br label %scan
scan:
  %i = phi i64 [0, %row], [%i_next, %scan]
  %top = phi <8 x float> [zeroinitializer, %row], [%top_next, %scan]
  %scan_p = getelementptr i16, ptr %x_r, i64 %i
  %scan_h = load <8 x i16>, ptr %scan_p, align 2
  %scan_w = zext <8 x i16> %scan_h to <8 x i32>
  %scan_b = shl <8 x i32> %scan_w, splat (i32 16)
  %scan_f = bitcast <8 x i32> %scan_b to <8 x float>
  %size_f = call <8 x float> @llvm.fabs.v8f32(<8 x float> %scan_f)
  %top_next = call <8 x float> @llvm.maximum.v8f32(<8 x float> %top, <8 x float> %size_f)
  %i_next = add i64 %i, 8
  %scan_more = icmp slt i64 %i_next, %size
  br i1 %scan_more, label %scan, label %scale
scale:
  %largest = call float @llvm.vector.reduce.fmaximum.v8f32(<8 x float> %top_next)
  %is_zero = fcmp oeq float %largest, 0.0
  %divisor = select i1 %is_zero, float 1.0, float %largest
  %up = fdiv float %limit, %divisor
  %down = fdiv float %divisor, %limit
  %scale_p = getelementptr float, ptr %row_scale, i64 %r
  store float %down, ptr %scale_p, align 4
  %up_i = insertelement <8 x float> poison, float %up, i32 0
  %up_v = shufflevector <8 x float> %up_i, <8 x float> poison, <8 x i32> zeroinitializer
  br label %write
write:
  %j = phi i64 [0, %scale], [%j_next, %write]
  %from_p = getelementptr i16, ptr %x_r, i64 %j
  %from_h = load <8 x i16>, ptr %from_p, align 2
  %from_w = zext <8 x i16> %from_h to <8 x i32>
  %from_b = shl <8 x i32> %from_w, splat (i32 16)
  %from_f = bitcast <8 x i32> %from_b to <8 x float>
  %scaled = fmul <8 x float> %from_f, %up_v
  %near = call <8 x i32> @llvm.x86.avx.cvt.ps2dq.256(<8 x float> %scaled)
  %short = trunc <8 x i32> %near to <8 x i16>
  %to_p = getelementptr i16, ptr %q_r, i64 %j
  store <8 x i16> %short, ptr %to_p, align 2
  %j_next = add i64 %j, 8
  %write_more = icmp slt i64 %j_next, %size
  br i1 %write_more, label %write, label %row_end
row_end:
  %r_next = add i64 %r, 1
  %more = icmp slt i64 %r_next, %rows
  br i1 %more, label %row, label %done
done:
  ret void
}}

; every row once, taken by any number of threads. job: x, q, row_scale, rows, size, counter
define void @quantise_rows(ptr %job) {{
entry:
  %x = load ptr, ptr %job
  %at.q = getelementptr i64, ptr %job, i64 1
  %q = load ptr, ptr %at.q
  %at.row_scale = getelementptr i64, ptr %job, i64 2
  %row_scale = load ptr, ptr %at.row_scale
  %at.rows = getelementptr i64, ptr %job, i64 3
  %rows = load i64, ptr %at.rows
  %at.size = getelementptr i64, ptr %job, i64 4
  %size = load i64, ptr %at.size
  %counter = getelementptr i64, ptr %job, i64 5
  br label %grab
grab:
  %r = atomicrmw add ptr %counter, i64 1 monotonic
  %is_row = icmp slt i64 %r, %rows
  br i1 %is_row, label %row, label %done
row:
  %first = mul i64 %r, %size
  %x_r = getelementptr i16, ptr %x, i64 %first
  %q_r = getelementptr i16, ptr %q, i64 %first
  %scale_r = getelementptr float, ptr %row_scale, i64 %r
  call void @quantise(ptr %x_r, ptr %q_r, ptr %scale_r, i64 1, i64 %size)
  br label %grab
done:
  ret void
}}
"""
